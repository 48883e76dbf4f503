"""The draft vocabulary: size, order, ends kept, exact maps, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.corpus import ResponseRecord
from drafters.errors import ConfigError, ContractError, DataError
from drafters.vocab import DraftVocab, build, count_tokens


def record(prompt: list[int], response: list[int]) -> ResponseRecord:
    return ResponseRecord("r", "chat", prompt, response, "stop", 0.0, 0)


def test_golden_map() -> None:
    counts = torch.tensor([0, 9, 0, 5, 5, 7, 0, 1])
    vocab = build(counts, 4, always_keep=[6])
    # 6 is an end id; then 1 (9 times), 5 (7 times), and 3 rather than 4 because ties go to the lower id.
    assert vocab.target_ids().tolist() == [1, 3, 5, 6]
    assert vocab.d2t.tolist() == [1, 2, 3, 3] and vocab.d2t.dtype == torch.int64
    assert vocab.t2d.tolist() == [False, True, False, True, False, True, True, False]
    assert vocab.to_target(torch.tensor([[3, 0]])).tolist() == [[6, 1]]
    assert vocab.to_draft(torch.tensor([0, 1, 3, 4, 6, 7])).tolist() == [-1, 0, 1, -1, 3, -1]
    assert (vocab.size, vocab.target_size) == (4, 8)


def test_prompts_and_responses_count() -> None:
    counts = count_tokens([record([1, 1, 2], [2, 3]), record([1], [3])], 5)
    assert counts.tolist() == [0, 3, 2, 2, 0]


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(DataError, match=r"record r: token ids span 1\.\.5 .* 0\.\.4"):
        count_tokens([record([1], [5])], 5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=2, max_size=40), st.data())
def test_round_trip_count_and_ends(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts)))
    ends = data.draw(st.lists(st.integers(0, len(counts) - 1), max_size=size, unique=True))
    vocab = build(torch.tensor(counts), size, ends)
    kept = vocab.target_ids()
    assert vocab.size == size and int(vocab.t2d.sum()) == size
    assert set(ends) <= set(kept.tolist())
    assert vocab.to_draft(vocab.to_target(torch.arange(size))).tolist() == list(range(size))
    assert (vocab.to_draft(torch.arange(len(counts))) >= 0).tolist() == vocab.t2d.tolist()
    left_out = [counts[i] for i in range(len(counts)) if not vocab.t2d[i]]
    free = [counts[i] for i in kept.tolist() if i not in ends]
    assert max(left_out, default=0) <= min(free, default=max(counts))


def test_full_size_is_the_identity() -> None:
    vocab = build(torch.tensor([0, 3, 1]), 3, [2])
    assert vocab.d2t.tolist() == [0, 0, 0] and vocab.t2d.all()


@pytest.mark.parametrize(
    ("size", "keep", "message"),
    [
        (9, [], r"draft_vocab_size=9 but the target has 8 ids.*at most 8"),
        (0, [], r"draft_vocab_size=0 but the target has 8 ids"),
        (1, [2, 3], r"draft_vocab_size=1 cannot hold the 2 end ids \[2, 3\].*at least 2"),
        (4, [8], r"end ids \[8\] do not all lie in the target's vocabulary 0\.\.7"),
        (4, [-1], r"end ids \[-1\] do not all lie"),
    ],
)
def test_build_refuses(size: int, keep: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(torch.ones(8, dtype=torch.int64), size, keep)


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        ([0, 0], [True, True, True], "t2d keeps 3 ids but d2t lists 2"),
        ([0, 0], [True, False, True], "draft id 1 is target id 1 by d2t but 2 by t2d"),
    ],
)
def test_maps_that_contradict_each_other_are_refused(d2t: list[int], t2d: list[bool], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        DraftVocab(torch.tensor(d2t), torch.tensor(t2d))


def test_wrong_kinds_are_refused() -> None:
    with pytest.raises(ContractError, match="d2t must be int64"):
        DraftVocab(torch.tensor([0.0]), torch.tensor([True]))


def test_hash_follows_the_map() -> None:
    counts = torch.tensor([3, 2, 1, 0])
    assert build(counts, 2, []).sha256() == build(counts * 2, 2, []).sha256()
    hashes = {
        build(counts, 2, []).sha256(),
        build(counts, 3, []).sha256(),
        build(counts, 2, [3]).sha256(),
        build(torch.tensor([3, 2, 1, 0, 0]), 2, []).sha256(),
    }
    assert len(hashes) == 4
