"""Magpie: the target writes both turns; every kind of unusable turn; resuming in either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from drafters.chat import render_prompt, user_turn
from drafters.config import MagpieData
from drafters.corpus import load_prompts
from drafters.errors import DataError
from drafters.generation import record_seed
from drafters.responses import (
    collect,
)
from tests.drafters.collecting_setup import Generator, StubTarget


@pytest.fixture(scope="module")
def target(tiny_target) -> StubTarget:
    return StubTarget(tiny_target.tokenizer, vocab_size=tiny_target.vocab_size, eos_ids=tiny_target.eos_ids)


MAGPIE = MagpieData(num_prompts=6, max_new_tokens=8)
# (words, ended by the target); the fourth repeats the first, the fifth is empty, the sixth never ends.
TURNS = [
    ("tell me\u2028a joke", True),
    ("how are you", True),
    ("write", True),
    (" tell me\u2028a joke ", True),
    (" ", True),
    ("and so on and", False),
]


class UserTurns(Generator):
    """Writes TURNS after the user prefix of each magpie prompt that is asked for."""

    def __init__(self, target: StubTarget, stop_after: int | None = None) -> None:
        super().__init__(stop_after)
        self.target = target
        self.texts = {record_seed(0, f"user/magpie-{i:06d}"): turn for i, turn in enumerate(TURNS)}

    def __call__(self, rows: Sequence[tuple[list[int], int]]) -> Iterator[tuple[int, list[int], str]]:
        for index, _, _ in super().__call__(rows):
            text, ended = self.texts[rows[index][1]]
            ids = self.target.tokenizer(text, add_special_tokens=False)["input_ids"]
            yield index, ids + [self.target.eos_ids[0]] * ended, "stop" if ended else "length"


def collect_magpie(target: StubTarget, folder: Path, turns: UserTurns, answers: Generator):
    return collect(load_prompts(MAGPIE), target, answers, MAGPIE, folder, generate_user_turn=turns)


def test_magpie_writes_both_turns(target: StubTarget, tmp_path: Path) -> None:
    turns, answers = UserTurns(target), Generator()
    found = collect_magpie(target, tmp_path, turns, answers)
    prefix = list(user_turn(target.tokenizer).prefix_ids)
    assert [ids for ids, _ in turns.asked] == [prefix] * 6
    texts = ["tell me\u2028a joke", "how are you", "write"]
    expected = [render_prompt(target.tokenizer, [{"role": "user", "content": text}]) for text in texts]
    assert [record.prompt_ids for record in found.records] == expected
    assert [record.id for record in found.records] == ["magpie-000000", "magpie-000001", "magpie-000002"]
    assert found.meta["counts"]["dropped_without_user_turn"] == 2
    assert found.meta["counts"]["dropped_repeated_user_turn"] == 1
    assert found.meta["settings"]["data.user_temperature"] == 1.0


@pytest.mark.parametrize(("turns_done", "answers_done"), [(0, 0), (3, 0), (None, 0), (None, 2)])
def test_magpie_resumes_in_either_turn(
    target: StubTarget, tmp_path: Path, turns_done: int | None, answers_done: int
) -> None:
    whole = collect_magpie(target, tmp_path / "whole", UserTurns(target), Generator())
    folder = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        collect_magpie(target, folder, UserTurns(target, turns_done), Generator(answers_done))
    with (folder / "user_turns.jsonl").open("ab") as file:
        file.write(b'{"id": "magpie-0000')  # the line being written when the process died
    turns, answers = UserTurns(target), Generator()
    resumed = collect_magpie(target, folder, turns, answers)
    assert resumed.records == whole.records and resumed.meta == whole.meta
    assert (len(turns.asked), len(answers.asked)) == (
        6 - (6 if turns_done is None else turns_done),
        3 - answers_done,
    )


def test_magpie_ends_a_turn_at_the_templates_own_end(target: StubTarget, tmp_path: Path) -> None:
    """A target that writes on past the end of the user turn is cut there even when no end id stopped it."""
    end = user_turn(target.tokenizer).end_text

    def turns(rows: Sequence[tuple[list[int], int]]) -> Iterator[tuple[int, list[int], str]]:
        for index in range(len(rows)):
            yield (
                index,
                target.tokenizer(f"q{index}{end}\nmore", add_special_tokens=False)["input_ids"],
                "length",
            )

    found = collect(load_prompts(MAGPIE), target, Generator(), MAGPIE, tmp_path, generate_user_turn=turns)
    expected = [render_prompt(target.tokenizer, [{"role": "user", "content": f"q{i}"}]) for i in range(6)]
    assert [record.prompt_ids for record in found.records] == expected


def test_magpie_leaves_out_an_end_id_that_is_not_the_templates(target: StubTarget, tmp_path: Path) -> None:
    (other_end,) = target.tokenizer.convert_tokens_to_ids(["<|endoftext|>"])
    assert target.tokenizer.decode([other_end]) != user_turn(target.tokenizer).end_text
    two_ends = replace(target, eos_ids=(other_end, *target.eos_ids))

    def turns(rows: Sequence[tuple[list[int], int]]) -> Iterator[tuple[int, list[int], str]]:
        for index in range(len(rows)):
            ids = target.tokenizer(f"q{index}", add_special_tokens=False)["input_ids"]
            yield index, [*ids, other_end], "stop"

    found = collect(load_prompts(MAGPIE), two_ends, Generator(), MAGPIE, tmp_path, generate_user_turn=turns)
    expected = [render_prompt(target.tokenizer, [{"role": "user", "content": f"q{i}"}]) for i in range(6)]
    assert [record.prompt_ids for record in found.records] == expected


def test_magpie_without_any_turn_is_an_error(target: StubTarget, tmp_path: Path) -> None:
    def turns(rows: Sequence[tuple[list[int], int]]) -> Iterator[tuple[int, list[int], str]]:
        yield from ((index, [40], "length") for index in range(len(rows)))

    with pytest.raises(DataError, match=r"none of 6 sampled user turns.*data\.max_prompt_tokens"):
        collect(load_prompts(MAGPIE), target, Generator(), MAGPIE, tmp_path, generate_user_turn=turns)


def test_magpie_needs_a_generator_of_user_turns(target: StubTarget, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs a generator of user turns"):
        collect(load_prompts(MAGPIE), target, Generator(), MAGPIE, tmp_path)
