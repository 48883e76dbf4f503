"""Several proposers in one tree."""

import math

import pytest
import torch

from runtime import SamplingParams
from runtime.calibration import Calibration
from runtime.engine import Engine
from runtime.proposers.base import Budget, Proposer
from runtime.proposers.merge import MergeProposer
from runtime.proposers.recycle import RecycleProposer
from runtime.proposers.suffix import SuffixProposer
from runtime.tree import DraftTree
from tests.runtime.conftest import PROMPTS


class Fixed(Proposer):
    """Proposes one tree whatever happens, and remembers what it was told."""

    def __init__(self, name, tree, taps=(), wants_logits=False):
        self.name, self.tree, self.taps, self.wants_logits = name, tree, taps, wants_logits
        self.asked, self.told = [], []

    def reserve(self, num_rows, num_slots):
        self.told.append(("reserve", num_rows, num_slots))

    def start(self, row, prompt, token, taps):
        self.told.append(("start", row, prompt, token, taps))

    def propose(self, budgets):
        self.asked.append(budgets)
        return {row: self.tree for row in budgets}

    def observe(self, row, tree, logits):
        self.told.append(("observe", row, tree, logits))

    def commit(self, row, tokens, taps):
        self.told.append(("commit", row, tokens, taps))

    def release(self, row):
        self.told.append(("release", row))


def tree(source, *nodes, root=1):
    """nodes: (token, parent, conditional chance)."""
    parents, depths, scores = [-1], [0], [0.0]
    for _, parent, chance in nodes:
        parents.append(parent)
        depths.append(depths[parent] + 1)
        scores.append(scores[parent] + math.log(chance))
    tokens = (root, *(token for token, _, _ in nodes))
    return DraftTree(tokens, tuple(parents), tuple(depths), tuple(scores), ("", *[source] * len(nodes)))


def merged(calibration, *trees, budget=None):
    members = [Fixed(each.sources[1] if len(each) > 1 else "x", each) for each in trees]
    return MergeProposer(members, calibration).propose({0: budget or Budget(99, 9)})[0]


def nodes(found):
    """path of tokens -> (source, conditional chance)."""
    keys, listed = [()], {}
    for node in range(1, len(found)):
        parent = found.parents[node]
        keys.append((*keys[parent], found.tokens[node]))
        listed[keys[node]] = found.sources[node], pytest.approx(math.exp(found.scores[node] - found.scores[parent]))
    return listed


A = tree("a", (5, 0, 0.6), (6, 1, 0.5), (7, 0, 0.2))
B = tree("b", (5, 0, 0.3), (8, 1, 0.9), (9, 0, 0.4), (6, 1, 0.7))


def test_the_tree_is_the_union_and_each_node_its_best_proposers():
    found = merged(Calibration(), A, B)
    assert nodes(found) == {
        (5,): ("a", 0.6), (5, 6): ("b", 0.7), (7,): ("a", 0.2), (5, 8): ("b", 0.9), (9,): ("b", 0.4),
    }  # fmt: skip
    assert nodes(merged(Calibration(), B, A)) == nodes(found)


def test_a_proposer_found_out_loses_its_nodes():
    calibration = Calibration()
    for _ in range(40):
        calibration.update(tree("a", (5, 0, 0.6)), (0,))  # a's drafts of 0.6 are never accepted
    assert nodes(merged(calibration, A, B))[(5,)] == ("b", 0.3)
    # temperature 0 and above are counted apart: what was learned of one says nothing of the other
    noisy = Budget(99, 9, noise=object())
    assert nodes(merged(calibration, A, B, budget=noisy))[(5,)] == ("a", 0.6)


@pytest.mark.parametrize("size", range(1, 7))
def test_the_likeliest_nodes_are_kept_with_their_parents(size):
    calibration = Calibration()
    calibration.update(tree("b", (5, 0, 0.4)), (0, 1))
    whole = merged(calibration, A, B)
    paths = calibration.path_probabilities(whole)
    found = merged(calibration, A, B, budget=Budget(size, 9))
    assert len(found) == size
    assert sorted(calibration.path_probabilities(whole), reverse=True)[:size] == sorted(
        (paths[index] for index, path in enumerate([(), *nodes(whole)]) if path in {(), *nodes(found)}), reverse=True
    )


def test_equal_chances_never_part_a_child_from_its_parent():
    certain = tree("c", *[(token, token - 10, 1.0) for token in range(10, 20)])
    other = tree("d", *[(token, token - 20, 1.0) for token in range(20, 30)])
    for size in range(1, 21):
        assert len(merged(Calibration(), other, certain, budget=Budget(size, 20))) == size


def test_members_that_draft_nothing_leave_the_others():
    assert nodes(merged(Calibration(), DraftTree.root(1), A)) == nodes(A)
    assert len(merged(Calibration(), DraftTree.root(1), DraftTree.root(1))) == 1


def test_a_member_without_scores_is_refused():
    member = Fixed("bare", DraftTree.chain(1, [2, 3]))
    with pytest.raises(ValueError, match="proposer 'bare' gives no scores or sources"):
        MergeProposer([member, Fixed("a", A)], Calibration()).propose({0: Budget(9, 9)})


def test_members_of_a_drawn_row_do_not_draw():
    member = Fixed("a", A)
    budgets = {0: Budget(9, 3, noise=object(), drawn=True), 1: Budget(8, 2, noise=object())}
    trees = MergeProposer([member, Fixed("b", B)], Calibration()).propose(budgets)
    assert member.asked == [{0: Budget(9, 3), 1: budgets[1]}]
    assert trees[0].draft_probs is None


def test_members_are_told_everything_and_get_their_own_taps():
    a, b, c = Fixed("a", A, taps=(2, 5)), Fixed("b", B, taps=(4,), wants_logits=True), Fixed("c", A)
    merge = MergeProposer([a, b, c], Calibration())
    assert (merge.name, merge.taps, merge.wants_logits) == ("a+b+c", (2, 4, 5), True)
    taps = torch.arange(12.0).reshape(2, 6)  # two tokens, three taps of width 2
    merge.reserve(3, 100)
    merge.start(0, [7, 8], 1, taps)
    merge.observe(0, A, "logits")
    merge.commit(0, [5], taps[:1])
    merge.release(0)
    assert [call[0] for call in a.told] == ["reserve", "start", "commit", "release"] == [call[0] for call in c.told]
    assert [call[0] for call in b.told] == ["reserve", "start", "observe", "commit", "release"]
    assert a.told[1][4].tolist() == [[0, 1, 4, 5], [6, 7, 10, 11]] and b.told[1][4].tolist() == [[2, 3], [8, 9]]
    assert a.told[2][3].tolist() == [[0, 1, 4, 5]] and c.told[1][4] is None
    alone = MergeProposer([a, c], Calibration())
    alone.start(0, [7, 8], 1, taps[:, :4])
    assert a.told[-1][4].tolist() == taps[:, :4].tolist()


def test_merging_an_adversary_costs_a_learned_merge_next_to_nothing():
    """A member claims certainty and is never right; b is right three times of four. Its nodes come to fill the tree."""
    calibration = Calibration()
    liar = tree("liar", *[(token, 0, 1.0) for token in range(100, 104)])
    right = tree("b", (5, 0, 0.75), (6, 1, 0.75), (7, 2, 0.75))
    for turn in range(200):
        found = merged(calibration, liar, right, budget=Budget(4, 9))
        path, keys = [0], nodes(found)
        numbers = {key: index for index, key in enumerate(keys, start=1)}
        for depth, key in enumerate([(5,), (5, 6), (5, 6, 7)]):
            if key not in numbers or (turn + depth) % 4 == 0:
                break
            path.append(numbers[key])
        calibration.update(found, tuple(path))
    assert nodes(merged(calibration, liar, right, budget=Budget(4, 9))) == nodes(right)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_text_with_eagle_and_lookup_is_plain_decodings(tiny_target, eagle, batch_size, temperature):
    params = [SamplingParams(12, temperature, seed) for seed in range(4)]
    plain = Engine.load(tiny_target, "none").generate(PROMPTS[:4], params)
    members = [eagle, SuffixProposer(), RecycleProposer(tiny_target.vocab_size)]
    engine = Engine.load(tiny_target, MergeProposer(members, Calibration()), batch_size=batch_size, num_draft_tokens=6)
    answers = engine.generate(PROMPTS[:4], params)
    assert [a.token_ids for a in answers] == [p.token_ids for p in plain]
    assert sum(a.stats.drafted for a in answers) > 0


def test_a_member_is_not_asked_deeper_than_it_was_trained_while_others_are():
    trained, free = Fixed("a", tree("a", (2, 0, 0.5))), Fixed("b", tree("b", (3, 0, 0.5)))
    trained.trained_depth = 4
    MergeProposer([trained, free], Calibration()).propose({0: Budget(16, 12), 1: Budget(16, 2)})
    assert [budget.depth for budget in trained.asked[0].values()] == [4, 2]
    assert [budget.depth for budget in free.asked[0].values()] == [12, 2]
