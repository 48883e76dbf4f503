"""Calibrated acceptance: posterior means worked out by hand, and only what was put to the test counted."""

from __future__ import annotations

import math
import random

import pytest

from runtime.calibration import MEMORY, PRIOR, Calibration
from runtime.tree import DraftTree


def tree(parents: list[int], raws: list[float], sources: list[str] | None = None) -> DraftTree:
    """A tree given by each node's parent and conditional probability, the root left out of both lists."""
    scores, depths = [0.0], [0]
    for parent, raw in zip(parents, raws):
        scores.append(scores[parent] + math.log(raw))
        depths.append(depths[parent] + 1)
    count = len(parents) + 1
    named = ("", *(sources or ["a"] * len(parents)))
    return DraftTree(tuple(range(count)), (-1, *parents), tuple(depths), tuple(scores), named)


FORK = tree([0, 0, 1, 1, 2], [0.6, 0.2, 0.5, 0.25, 0.9])


def test_before_any_try_a_proposer_is_believed():
    fresh = Calibration()
    for raw in (0.0, 0.01, 0.5, 1.0):
        assert fresh.probability("a", 1, raw) == raw
    assert fresh.path_probabilities(FORK) == pytest.approx([1.0, 0.6, 0.2, 0.3, 0.15, 0.18], abs=1e-15)


def test_the_posterior_mean_is_worked_out_by_hand():
    known = Calibration()
    chain = tree([0], [0.6])
    for accepted in (True, True, False, False, False):
        known.update(chain, (0, 1) if accepted else (0,))
    assert known.probability("a", 1, 0.6) == pytest.approx((2 + PRIOR * 0.6) / (5 + PRIOR), abs=1e-15)
    # Others are not touched: another proposer, depth, bucket, and sampling.
    untouched = [("b", 1, 0.6, False), ("a", 2, 0.6, False), ("a", 1, 0.5, False), ("a", 1, 0.6, True)]
    assert [known.probability(*key) for key in untouched] == [key[2] for key in untouched]


def test_only_children_of_accepted_nodes_were_tried():
    known = Calibration()
    known.update(FORK, (0, 1, 3))
    # Node 1 accepted, its sibling 2 not; node 3 accepted, its sibling 4 not; node 5 hung below a rejected node.
    assert known.probability("a", 1, 0.6) == pytest.approx((1 + PRIOR * 0.6) / (1 + PRIOR))
    assert known.probability("a", 1, 0.2) == pytest.approx(PRIOR * 0.2 / (1 + PRIOR))
    assert known.probability("a", 2, 0.5) == pytest.approx((1 + PRIOR * 0.5) / (1 + PRIOR))
    assert known.probability("a", 2, 0.25) == pytest.approx(PRIOR * 0.25 / (1 + PRIOR))
    assert known.probability("a", 2, 0.9) == 0.9


def test_greedy_and_sampled_rows_are_counted_apart():
    known = Calibration()
    for _ in range(50):
        known.update(FORK, (0,), sampled=True)
    assert known.path_probabilities(FORK)[1] == pytest.approx(0.6)
    assert known.path_probabilities(FORK, sampled=True)[1] < 0.05


def test_sources_of_one_tree_are_counted_apart():
    mixed = tree([0, 0], [0.5, 0.5], ["eagle3", "suffix"])
    known = Calibration()
    for _ in range(100):
        known.update(mixed, (0, 2))
    assert known.probability("suffix", 1, 0.5) > 0.95 and known.probability("eagle3", 1, 0.5) < 0.05


def test_the_truth_is_found_whatever_the_proposer_claims():
    rng = random.Random(0)
    for claimed, true in ((1.0, 0.1), (0.02, 0.7), (0.5, 0.5)):
        known = Calibration()
        chain = tree([0], [claimed])
        for _ in range(400):
            known.update(chain, (0, 1) if rng.random() < true else (0,))
        assert known.probability("a", 1, claimed) == pytest.approx(true, abs=0.06)


def test_paths_never_rise_on_the_way_down():
    rng = random.Random(1)
    known = Calibration()
    for _ in range(200):
        parents = [rng.randrange(node + 1) for node in range(15)]
        grown = tree(parents, [rng.uniform(0.001, 1.0) for _ in parents])
        path = [0]
        while children := [n for n in range(1, 16) if grown.parents[n] == path[-1]]:
            if rng.random() < 0.4:
                break
            path.append(rng.choice(children))
        known.update(grown, tuple(path))
        paths = known.path_probabilities(grown)
        assert paths[0] == 1.0
        assert all(paths[node] <= paths[grown.parents[node]] for node in range(1, 16))


def test_siblings_share_one_acceptance():
    greedy = tree([0, 0, 1], [0.9, 0.9, 0.5])
    paths = Calibration().path_probabilities(greedy)
    assert paths == pytest.approx([1.0, 0.5, 0.5, 0.25])


def test_old_counts_make_room_for_new_ones():
    known = Calibration()
    chain = tree([0], [0.5])
    for _ in range(5000):
        known.update(chain, (0, 1))
    rounds = 0
    while known.probability("a", 1, 0.5) > 0.5:
        known.update(chain, (0,))
        rounds += 1
    assert rounds < MEMORY


def test_memory_is_bounded_by_the_kinds_of_drafts():
    rng = random.Random(2)
    known = Calibration()
    for _ in range(3000):
        known.update(tree(list(range(20)), [rng.uniform(1e-6, 1.0) for _ in range(20)]), tuple(range(21)))
    assert len(known._counts) <= 12 * 8


def test_trees_without_scores_or_sources_are_counted_too():
    bare = DraftTree.chain(5, [6])
    known = Calibration()
    assert known.path_probabilities(bare) == [1.0, 0.5]
    for _ in range(100):
        known.update(bare, (0,))
    assert known.path_probabilities(bare)[1] < 0.05


@pytest.mark.parametrize("raw", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_number_that_is_no_probability_names_the_proposer(raw):
    with pytest.raises(ValueError, match=r"proposer 'small' gives a draft the conditional probability"):
        Calibration().probability("small", 1, raw)
    rising = DraftTree((1, 2), (-1, 0), (0, 1), (0.0, 0.5), ("", "small"))
    with pytest.raises(ValueError, match="a child's must not lie above its parent's"):
        Calibration().path_probabilities(rising)


def test_rounding_above_the_parent_is_no_error():
    rounded = DraftTree((1, 2, 3), (-1, 0, 1), (0, 1, 2), (0.0, -9.5, -9.5 + 1e-6), ("", "a", "a"))
    assert Calibration().path_probabilities(rounded)[2] == pytest.approx(math.exp(-9.5))
