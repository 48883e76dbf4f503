"""Collecting: resume after a kill at any byte, refusals, counts; folders read back; regeneration."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.progress import Progress

from drafters.artifacts import MANIFEST_NAME
from drafters.chat import render_prompt
from drafters.corpus import Prompt, ResponseRecord, read_records, record_line
from drafters.errors import ArtifactError, ContractError, DataError
from drafters.generation import record_seed
from drafters.responses import (
    PACKED_NAME,
    RECORDS_NAME,
    SETTINGS_NAME,
    collect,
    join,
    pack_responses,
    read_responses,
    regenerate_slice,
)
from tests.drafters.collecting_setup import CONFIG, HASHES, PROMPTS, Generator, StubTarget, answer, reason


@pytest.fixture(scope="module")
def target(tiny_target) -> StubTarget:
    return StubTarget(tiny_target.tokenizer, vocab_size=tiny_target.vocab_size, eos_ids=tiny_target.eos_ids)


@pytest.fixture(scope="module")
def finished(target: StubTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    collect(PROMPTS, target, Generator(), CONFIG, folder, command="python distill.py")
    return folder


def test_records_hold_exact_ids_in_prompt_order(target: StubTarget, tmp_path: Path) -> None:
    found = collect(PROMPTS, target, Generator(), CONFIG, tmp_path, command="python distill.py")
    for prompt, record in zip(PROMPTS, found.records, strict=True):
        ids = render_prompt(target.tokenizer, prompt.messages)
        seed = record_seed(0, prompt.id)
        assert record == ResponseRecord(prompt.id, "chat", ids, answer(ids, seed), reason(seed), 0.0, seed)
    assert list(read_records(tmp_path / RECORDS_NAME)) == found.records


def test_manifest_states_settings_counts_and_command(finished: Path) -> None:
    meta = read_responses(finished).meta
    records = read_responses(finished).records
    assert meta["command"] == "python distill.py"
    assert {record.finish_reason for record in records} == {"stop", "length"}
    assert meta["counts"] == {
        "records": 6,
        "prompt_tokens": sum(len(record.prompt_ids) for record in records),
        "response_tokens": sum(len(record.response_ids) for record in records),
        "stopped": sum(record.finish_reason == "stop" for record in records),
        "cut_at_length": sum(record.finish_reason == "length" for record in records),
        "dropped_too_long": 0,
    }
    settings = meta["settings"]
    assert {name: settings[name] for name in HASHES} == HASHES
    assert (settings["data.source"], settings["data.temperature"], settings["data.max_new_tokens"]) == (
        "builtin",
        0.0,
        8,
    )
    assert (settings["data.max_prompt_tokens"], settings["data.seed"], settings["prompts"]) == (512, 0, 6)


def test_seeds_depend_on_run_and_id_only() -> None:
    seeds = {record_seed(seed, name) for seed in range(5) for name in ("a", "b", "c")}
    assert len(seeds) == 15 and all(0 <= seed < 2**31 for seed in seeds)
    assert record_seed(0, "p0") == 1716657539


def test_a_finished_folder_is_not_collected_again(finished: Path, target: StubTarget) -> None:
    before = (finished / RECORDS_NAME).read_bytes()
    again = Generator()
    found = collect(PROMPTS, target, again, CONFIG, finished)
    assert again.asked == [] and found.meta["command"] == "python distill.py"
    assert (finished / RECORDS_NAME).read_bytes() == before


def test_too_long_prompts_are_left_out_and_counted(target: StubTarget, tmp_path: Path, caplog) -> None:
    long = Prompt("long", "chat", ({"role": "user", "content": "words " * 300},))
    found = collect([*PROMPTS, long], target, Generator(), CONFIG, tmp_path)
    assert [record.id for record in found.records] == [prompt.id for prompt in PROMPTS]
    assert found.meta["counts"]["dropped_too_long"] == 1
    assert "1 prompts longer than data.max_prompt_tokens=512" in caplog.text


def test_a_prompt_of_exactly_the_limit_is_kept(target: StubTarget, tmp_path: Path) -> None:
    limit = len(render_prompt(target.tokenizer, PROMPTS[0].messages))
    at = collect(PROMPTS, target, Generator(), replace(CONFIG, max_prompt_tokens=limit), tmp_path / "at")
    assert len(at.records) == 6
    with pytest.raises(DataError, match=f"none of 6 prompts is within data.max_prompt_tokens={limit - 1}"):
        collect(
            PROMPTS, target, Generator(), replace(CONFIG, max_prompt_tokens=limit - 1), tmp_path / "below"
        )


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_killed_at_any_byte_the_same_command_gives_the_same_file(
    finished: Path, target: StubTarget, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Records are on disk in completion order when the process dies in the middle of a line."""
    folder = tmp_path_factory.mktemp("killed")
    shutil.copy(finished / SETTINGS_NAME, folder)
    lines = (finished / RECORDS_NAME).read_bytes().splitlines(keepends=True)
    written = b"".join(data.draw(st.permutations(lines)))
    cut = data.draw(st.integers(0, len(written)))
    (folder / RECORDS_NAME).write_bytes(written[:cut])
    resumed = Generator()
    found = collect(PROMPTS, target, resumed, CONFIG, folder, command="python distill.py")
    assert len(resumed.asked) == 6 - written[:cut].count(b"\n")
    assert (folder / RECORDS_NAME).read_bytes() == (finished / RECORDS_NAME).read_bytes()
    assert found.meta == read_responses(finished).meta


@pytest.mark.parametrize("answered", [0, 1, 4])
def test_kill_9_and_the_same_command_again(
    finished: Path, target: StubTarget, tmp_path: Path, answered: int
) -> None:
    child = os.fork()
    if child == 0:
        collect(PROMPTS, target, Generator(stop_after=answered, kill=True), CONFIG, tmp_path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not (tmp_path / MANIFEST_NAME).exists()
    with pytest.raises(ArtifactError, match=r"begun but not finished.*same distill\.py command"):
        read_responses(tmp_path)
    resumed = Generator()
    collect(PROMPTS, target, resumed, CONFIG, tmp_path)
    assert len(resumed.asked) == 6 - answered
    assert (tmp_path / RECORDS_NAME).read_bytes() == (finished / RECORDS_NAME).read_bytes()


def test_killed_while_finishing(finished: Path, target: StubTarget, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(finished, folder)
    (folder / MANIFEST_NAME).unlink()
    (folder / f".{RECORDS_NAME}.tmp").write_bytes(b'{"id":')
    again = Generator()
    collect(PROMPTS, target, again, CONFIG, folder)
    assert again.asked == []
    assert (folder / RECORDS_NAME).read_bytes() == (finished / RECORDS_NAME).read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"temperature": 0.5},
            r"data\.temperature=0\.0, this run has data\.temperature=0\.5\. Set data\.temp.*=0\.0",
        ),
        ({"max_new_tokens": 9}, r"data\.max_new_tokens=8, this run has data\.max_new_tokens=9"),
        ({"max_prompt_tokens": 99}, r"data\.max_prompt_tokens=512, this run has data\.max_prompt_tokens=99"),
        ({"seed": 1}, r"data\.seed=0, this run has data\.seed=1"),
    ],
)
@pytest.mark.parametrize("complete", [True, False])
def test_other_settings_are_refused(
    finished: Path, target: StubTarget, tmp_path: Path, change: dict, message: str, complete: bool
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(finished, folder)
    if not complete:
        (folder / MANIFEST_NAME).unlink()
    with pytest.raises(ContractError, match=message + ".*another output_dir"):
        collect(PROMPTS, target, Generator(), replace(CONFIG, **change), folder)
    assert (folder / RECORDS_NAME).read_bytes() == (finished / RECORDS_NAME).read_bytes()


@pytest.mark.parametrize("name", [name for name in HASHES if name != "target"])
def test_another_target_is_refused(finished: Path, target: StubTarget, name: str) -> None:
    other = replace(target, fingerprint={**HASHES, name: "zz"})
    with pytest.raises(ContractError, match=f"begun with {name}={HASHES[name]}, this run has {name}=zz"):
        collect(PROMPTS, other, Generator(), CONFIG, finished)
    with pytest.raises(
        ContractError, match=f"{name} is {HASHES[name]} .*target 'stub' has zz.*data.responses=null"
    ):
        read_responses(finished).require_target(other)


def test_the_same_target_under_another_path_is_accepted(finished: Path, target: StubTarget) -> None:
    moved = replace(target, fingerprint={**HASHES, "target": "/elsewhere"})
    read_responses(finished).require_target(moved)
    assert len(collect(PROMPTS, moved, Generator(), CONFIG, finished).records) == 6


def test_other_prompts_are_refused(finished: Path, target: StubTarget) -> None:
    with pytest.raises(ContractError, match="begun with prompts=6, this run has prompts=5"):
        collect(PROMPTS[:5], target, Generator(), CONFIG, finished)
    changed = [*PROMPTS[:5], replace(PROMPTS[5], messages=({"role": "user", "content": "other"},))]
    with pytest.raises(ContractError, match="begun with prompts_sha256="):
        collect(changed, target, Generator(), CONFIG, finished)


def test_records_without_settings_are_refused(target: StubTarget, tmp_path: Path) -> None:
    (tmp_path / RECORDS_NAME).write_text("")
    with pytest.raises(ArtifactError, match=r"responses\.jsonl but no settings\.json"):
        collect(PROMPTS, target, Generator(), CONFIG, tmp_path)


def test_settings_of_another_version_are_refused(target: StubTarget, tmp_path: Path) -> None:
    (tmp_path / SETTINGS_NAME).write_text(json.dumps(HASHES))
    with pytest.raises(
        ContractError, match=r"settings\.json lacks data\.source; it was written by another version"
    ):
        collect(PROMPTS, target, Generator(), CONFIG, tmp_path)


@pytest.mark.parametrize("ids", [[], [-1], [3, 512]])
def test_impossible_ids_are_refused(target: StubTarget, tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(
        DataError, match=r"record p0: the generator returned .* expected at least one id in 0\.\.511"
    ):
        collect(PROMPTS, target, lambda rows: iter([(0, ids, "stop")]), CONFIG, tmp_path)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ([(0, [3], "stop")], r"1 records for 6 prompts \(missing \['p1', 'p2', 'p3'\]"),
        ([(0, [3], "stop")] * 2, "record 'p0' occurs twice"),
        ([(0, [3], "eos")], "finish_reason is 'eos'"),
    ],
)
def test_an_unfaithful_generator_is_refused(
    target: StubTarget, tmp_path: Path, out: list, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        collect(PROMPTS, target, lambda rows: iter(out), CONFIG, tmp_path)
    assert not (tmp_path / MANIFEST_NAME).exists()


def test_a_record_nobody_asked_for_is_refused(finished: Path, target: StubTarget, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(finished, folder)
    (folder / MANIFEST_NAME).unlink()
    strange = replace(read_responses(finished).records[0], id="strange")
    with (folder / RECORDS_NAME).open("a") as file:
        file.write(record_line(strange))
    with pytest.raises(DataError, match=r"7 records for 6 prompts \(missing \[\], unasked \['strange'\]"):
        collect(PROMPTS, target, Generator(), CONFIG, folder)


def test_progress_bar_counts_what_is_there_and_what_comes(
    finished: Path, target: StubTarget, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        collect(PROMPTS, target, Generator(stop_after=2), CONFIG, tmp_path)
    progress = Progress(disable=True)
    collect(PROMPTS, target, Generator(stop_after=None), CONFIG, tmp_path, progress=progress)
    (task,) = progress.tasks
    assert (task.description, task.completed, task.total) == ("responses", 6, 6)


def test_without_a_bar_the_end_is_logged(target: StubTarget, tmp_path: Path, caplog) -> None:
    with caplog.at_level("INFO"):
        collect(PROMPTS, target, Generator(), CONFIG, tmp_path)
    assert "responses: 6/6 rows" in caplog.text


# ---- folders


def test_a_packed_folder_reads_back_equal(finished: Path, tmp_path: Path) -> None:
    dest = pack_responses(finished, tmp_path / "packed")
    assert sorted(path.name for path in dest.iterdir()) == [MANIFEST_NAME, PACKED_NAME]
    before, after = read_responses(finished), read_responses(dest)
    assert after.records == before.records and after.meta == before.meta
    twice = pack_responses(dest, tmp_path / "twice")
    assert (twice / PACKED_NAME).read_bytes() == (dest / PACKED_NAME).read_bytes()


def test_a_changed_byte_is_named(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(finished, folder)
    path = folder / RECORDS_NAME
    path.write_bytes(path.read_bytes().replace(b'"chat"', b'"chaT"', 1))
    with pytest.raises(ArtifactError, match=r"responses\.jsonl: sha256"):
        read_responses(folder)


def test_a_manifest_with_another_count_is_refused(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(finished, folder)
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    manifest["counts"]["records"] = 7
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=r"6 records, manifest\.json says 7"):
        read_responses(folder)


# ---- regenerating


def test_a_regenerated_slice_is_equal(finished: Path) -> None:
    records = read_responses(finished).records
    generator = Generator()
    assert regenerate_slice(records, generator, 3, 99) == (3, 3)
    assert generator.asked == [(records[i].prompt_ids, records[i].seed) for i in (0, 2, 4)]
    assert regenerate_slice(records, Generator(), 100, 99) == (6, 6)


def test_only_the_first_tokens_are_compared_where_no_more_are_generated(finished: Path) -> None:
    records = read_responses(finished).records

    def generate(rows: Sequence[tuple[list[int], int]]) -> Iterator[tuple[int, list[int], str]]:
        yield from ((index, ids[:2], "length") for index, ids, _ in Generator()(rows))

    longer = sum(len(record.response_ids) > 2 for record in records)
    assert longer > 0
    assert regenerate_slice(records, generate, 6, 2) == (6, 6)
    assert regenerate_slice(records, generate, 6, 3) == (6 - longer, 6)


@pytest.mark.parametrize("change", ["last", "shorter", "longer"])
def test_one_other_token_is_seen(finished: Path, caplog, change: str) -> None:
    records = read_responses(finished).records

    def generate(rows: Sequence[tuple[list[int], int]]) -> Iterator[tuple[int, list[int], str]]:
        for index, ids, why in Generator()(rows):
            if index == 1:
                ids = {"last": ids[:-1] + [ids[-1] + 1], "shorter": ids[:-1], "longer": ids + [3]}[change]
            yield index, ids, why

    assert regenerate_slice(records, generate, 6, 99) == (5, 6)
    at = len(records[1].response_ids) - (change != "longer")
    assert f"record p1: regenerated response differs from token {at} on" in caplog.text


def test_answers_that_do_not_come_are_not_equal(finished: Path) -> None:
    records = read_responses(finished).records
    assert regenerate_slice(records, lambda rows: iter(list(Generator()(rows))[:2]), 4, 99) == (2, 4)


def test_sets_join_in_order_and_a_record_in_two_of_them_is_refused(finished: Path, tmp_path: Path) -> None:
    one = read_responses(finished)
    other = replace(
        one,
        folder=tmp_path / "other",
        records=[replace(record, id=f"other-{record.id}") for record in one.records],
    )
    both = join([one, other])
    assert [record.id for record in both.records] == [r.id for r in one.records] + [r.id for r in other.records]
    assert both.meta["counts"]["records"] == 2 * len(one.records)
    assert both.meta["settings"] == one.meta["settings"]
    with pytest.raises(DataError, match=f"{one.records[0].id}.*is in both.*Leave one of the folders out"):
        join([one, one])
