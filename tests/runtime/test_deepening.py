"""Drafting level by level: every proposer that can asks before the next one, and stops where it is told to."""

import math

import pytest

from runtime.calibration import Calibration
from runtime.deepening import HOPE, PRIOR, Deepening
from runtime.proposers.base import Budget
from runtime.proposers.merge import MergeProposer
from runtime.proposers.ngram import NgramProposer
from tests.runtime.conftest import PROMPTS
from tests.runtime.test_heads import _started
from tests.runtime.test_heads import drafters as drafters
from tests.runtime.test_proposers_small import own as own
from tests.runtime.test_proposers_small import proposer as proposer


class Asked:
    """Budget.deeper as a script: goes deeper from the levels before `until`, and keeps what it was asked."""

    def __init__(self, until: int) -> None:
        self.until, self.questions = until, []

    def __call__(self, source: str, level: int, chances: dict[int, float]) -> bool:
        self.questions.append((source, level, dict(chances)))
        return level < self.until


def best_by_level(tree, level):
    return max(math.exp(tree.scores[node]) for node in range(len(tree)) if tree.depths[node] == level)


@pytest.mark.parametrize("kind", ["medusa-1", "hydra"])
@pytest.mark.parametrize("until", [1, 2])
def test_heads_stop_where_they_are_told_to(drafters, kind, until):
    proposer, _, _ = _started(drafters[kind], rows=2)
    whole = proposer.propose({0: Budget(12, until), 1: Budget(12, 1)})
    asked = Asked(until)
    trees = proposer.propose({0: Budget(12, 3, deeper=asked), 1: Budget(12, 1, deeper=asked)})
    assert trees == whole
    assert [(source, level) for source, level, _ in asked.questions] == [
        (proposer.name, level) for level in range(1, until + 1)
    ]
    for _, level, chances in asked.questions:
        assert chances == {0: pytest.approx(best_by_level(whole[0], level))}  # row 1 ends at level 1


@pytest.mark.parametrize("until", [1, 2])
def test_eagle_stops_where_it_is_told_to_and_saves_the_levels(eagle, make_engine, monkeypatch, until):
    engine = make_engine(eagle, num_draft_tokens=12)
    engine._reserve(64)
    ids = engine.encode(PROMPTS[0])
    taps = engine._runner.prefill(0, ids)[1]
    layers, forward = [], eagle.drafter.forward_layer
    monkeypatch.setattr(eagle.drafter, "forward_layer", lambda *a: layers.append(1) or forward(*a))
    trees = []
    for deeper in (None, Asked(until)):
        eagle.start(0, ids, 9, taps[0])
        layers.clear()
        trees.append(eagle.propose({0: Budget(12, 3 if deeper else until, deeper=deeper)})[0])
        eagle.release(0)
        assert len(layers) == until  # one forward per level, the first with the committed tokens
    assert trees[0] == trees[1]
    assert deeper.questions[-1] == ("eagle3", until, {0: pytest.approx(best_by_level(trees[0], until))})


def test_a_small_model_stops_where_it_is_told_to(proposer):
    proposer.start(0, [5, 6, 7], 8, None)
    proposer.start(1, [9], 4, None)
    asked = Asked(2)
    trees = proposer.propose({0: Budget(16, 5, deeper=asked), 1: Budget(16, 1, deeper=asked)})
    assert max(trees[0].depths) == 2 and max(trees[1].depths) == 1
    assert asked.questions == [
        ("small", 1, {0: pytest.approx(best_by_level(trees[0], 1))}),
        ("small", 2, {0: pytest.approx(best_by_level(trees[0], 2))}),
    ]


def test_a_merged_tree_asks_where_a_member_does(proposer):
    assert MergeProposer((NgramProposer(), proposer), Calibration()).asks
    assert not MergeProposer((NgramProposer(), NgramProposer()), Calibration()).asks


def test_worth_starts_as_hoped_follows_what_came_and_is_forgotten():
    found = Deepening()
    assert found.worth(1, False) == HOPE
    for _ in range(50):
        found.update(1, False, 0.5, False)
    assert found.worth(1, False) == pytest.approx(HOPE * PRIOR / (25 + PRIOR))
    assert found.worth(1, True) == found.worth(2, False) == HOPE  # other rows, other levels
    for _ in range(2000):
        found.round()
    assert found.worth(1, False) == pytest.approx(HOPE, abs=1e-3)
    for _ in range(200):
        found.update(2, True, 0.8, True)
    assert found.worth(2, True) == pytest.approx((200 + HOPE * PRIOR) / (160 + PRIOR))
