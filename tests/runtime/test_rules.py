"""Each acceptance rule against plain decoding, every outcome enumerated."""

import random

import pytest
import torch

from runtime import rules
from runtime.processors import Processors
from runtime.rules import decide
from runtime.sampling import Noise, SamplingParams
from runtime.tree import DraftTree
from tests.runtime.enumeration import (
    EOS,
    PROMPT,
    ROOT,
    SETTINGS,
    Plain,
    Table,
    Toy,
    by_law,
    deciding,
    drawn,
    ends,
    every_noise,
    node_logits,
    params_for,
    paths,
    rejection_error,
)

EXACT = 1e-12
WRONG = 1e-3  # the wrong rules are off by far more than rounding
BUSHY = DraftTree((0, 0, 1, 1, 2, 0), (-1, 0, 0, 1, 1, 2), (0, 1, 1, 2, 2, 2))
SPARSE = DraftTree((0, 2, 1, 0), (-1, 0, 1, 2), (0, 1, 2, 3))


# ---- coupled


@pytest.mark.parametrize("tree", [DraftTree.root(0), BUSHY, SPARSE], ids=["root", "bushy", "chain"])
@pytest.mark.parametrize("name", SETTINGS)
def test_coupled_is_exact_under_every_processor(name, tree):
    assert coupled_error(tree, name) < EXACT


def coupled_error(tree: DraftTree, name: str, edit=lambda noise: noise) -> float:
    params, target = params_for(name), Toy(3, 5)
    plain, rule = Plain(target, params), deciding(target, params)
    outcomes = []
    with pytest.MonkeyPatch.context() as patch:
        for noise, weight in every_noise(tree, plain):
            # decide() is given no noise by deciding(): the request's own is the table
            patch.setattr("runtime.sampling.Noise", lambda *_, noise=noise: edit(noise))
            outcomes.append((tree, rule(tree, None), weight))
    assert abs(sum(weight for *_, weight in outcomes) - 1) < EXACT
    return plain.error(outcomes, max(tree.depths) + 1)


def test_coupled_with_one_noise_for_all_depths_is_caught():
    first = lambda noise: Table(dict.fromkeys(noise.rows, noise.rows[ROOT + 1]))  # noqa: E731
    assert coupled_error(BUSHY, "temperature", first) > WRONG


def test_coupled_text_is_plain_seeded_decoding_whatever_is_drafted():
    """50 seeds: rounds on random trees and rounds on roots alone emit the same tokens."""
    target, rng = Toy(5, 3), random.Random(0)
    for seed in range(50):
        params = SamplingParams(temperature=1.0, seed=seed)
        texts = []
        for drafting in (False, True):
            text, noise = list(PROMPT), Noise(seed, 5)
            while len(text) < len(PROMPT) + 12:
                tree = _random_tree(rng, text[-1]) if drafting else DraftTree.root(text[-1])
                logits = torch.stack([target.logits((*text, *path)) for path in paths(tree)])
                end = decide(tree, logits, params, noise, len(text) - 1)
                text += [*(tree.tokens[node] for node in end.path[1:]), end.next_token]
            texts.append(text[: len(PROMPT) + 12])
        assert texts[0] == texts[1]


def _random_tree(rng: random.Random, root: int) -> DraftTree:
    tokens, parents, depths = [root], [-1], [0]
    for _ in range(7):
        parent, token = rng.randrange(len(tokens)), rng.randrange(5)
        if (parent, token) not in zip(parents, tokens):
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return DraftTree(tuple(tokens), tuple(parents), tuple(depths))


# ---- rejection

SHAPES = {  # vocabulary, children per node by depth
    "chain": (3, (1, 1)),
    "long chain": (3, (1, 1, 1)),
    "two": (5, (2,)),
    "three": (4, (3,)),
    "tree": (3, (2, 1)),
    "bush": (3, (2, 2)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_rejection_is_exact_on_drawn_trees(shape):
    vocab, counts = SHAPES[shape]
    assert rejection_error(drawn(Toy(vocab, 8), counts), Toy(vocab, 7), len(counts) + 1) < EXACT


@pytest.mark.parametrize("counts", [(1, 1), (2, 1)], ids=["block", "tree"])
@pytest.mark.parametrize("name", SETTINGS)
def test_rejection_is_exact_under_every_processor(name, counts):
    params = params_for(name, "rejection")
    assert rejection_error(drawn(Toy(3, 8), counts), Toy(3, 7), len(counts) + 1, params=params) < EXACT


@pytest.mark.parametrize("tree", [DraftTree.root(0), BUSHY, SPARSE], ids=["root", "bushy", "chain"])
@pytest.mark.parametrize("name", SETTINGS)
def test_rejection_is_exact_on_drafts_that_were_not_drawn(name, tree):
    params = params_for(name, "rejection")
    assert rejection_error([(tree, 1.0)], Toy(3, 7), max(tree.depths) + 1, params=params) < EXACT


@pytest.mark.parametrize("counts", [(1, 1), (2, 1)], ids=["block", "tree"])
def test_rejection_is_exact_when_target_and_drafter_agree_or_share_nothing(counts):
    """p == q leaves no residual; a drafter that puts nothing where the target does leaves all of it."""
    target = Toy(3, 7)
    assert rejection_error(drawn(target, counts), target, len(counts) + 1) < EXACT

    class Disjoint(Toy):
        def logits(self, text):
            return super().logits(text) + torch.tensor([0.0, 0.0, -1e4])

    class Rest(Toy):
        def logits(self, text):
            return torch.tensor([-1e4, -1e4, 0.0]).double()

    if counts == (1, 1):  # a second child cannot be drawn from a law on one token
        assert rejection_error(drawn(Rest(3, 0), counts), Disjoint(3, 7), len(counts) + 1) < EXACT
    assert rejection_error(drawn(Disjoint(3, 1), counts), Rest(3, 0), len(counts) + 1) < EXACT


def test_block_accepts_more_than_the_token_rule():
    """Mean accepted over 8 random pairs, enumerated: ."""
    gains = {}
    for depth in (2, 3):
        sums = [0.0, 0.0]  # block, token
        for seed in range(8):
            target, chains = Toy(3, 100 + seed), list(drawn(Toy(3, 200 + seed), (1,) * depth))
            for at, rule in enumerate((rules.block, rules.without_replacement)):
                for _, end, weight in ends(chains, by_law(rule, target)):
                    assert end.path == tuple(range(len(end.path)))
                    sums[at] += weight * (len(end.path) - 1)
        gains[depth] = sums[0] / sums[1] - 1
    assert 0.02 < gains[2] < gains[3] < 0.2


# ---- dispatch, temperature 0, typical


@pytest.mark.parametrize("verification", ["coupled", "rejection", "typical"])
def test_every_rule_is_greedy_at_temperature_0(verification):
    rng = random.Random(1)
    params = SamplingParams(verification=verification)
    for seed in range(40):
        tree = _random_tree(rng, 0)
        logits = node_logits(Toy(5, seed), tree)
        assert decide(tree, logits, params, None, 3) == decide(tree, logits, SamplingParams(), None, 3)


@pytest.mark.parametrize("verification", ["coupled", "rejection", "typical"])
@pytest.mark.parametrize("value, word", [(float("nan"), "not finite"), (float("inf"), "not finite")])
def test_bad_logits_name_the_position(verification, value, word):
    logits = torch.zeros(1, 4)
    logits[0, 2] = value
    params = SamplingParams(temperature=1.0, verification=verification)
    with pytest.raises(ValueError, match=f"position 8.*{word}"):
        decide(DraftTree.root(0), logits, params, None, 7)


def test_typical_follows_medusas_threshold():
    """p(c) > min(0.09, 0.3 exp(-H)): on a flat law of 20 the entropy lowers the bar to 0.015."""
    params = SamplingParams(temperature=1.0, verification="typical")
    flat = torch.full((20,), 0.05)
    sharp = torch.tensor([0.88, 0.10, 0.02] + [0.0] * 17)
    tree = DraftTree((0, 2, 1, 7, 3), (-1, 0, 0, 2, 3), (0, 1, 1, 2, 3))
    logits = torch.stack([sharp, flat, flat, sharp, flat]).log()
    end = decide(tree, logits, params, None, 0)
    assert end.path == (0, 2, 3)  # 2 is under 0.09 and goes; 7 stands on a flat law; 3 has probability 0


@pytest.mark.parametrize("token, accepted", [(1, True), (2, False)])
def test_typical_threshold_is_epsilon_on_a_sharp_law(token, accepted):
    """0.3 exp(-H) is 0.17 here, so the bar is 0.09; with the two constants swapped it would be 0.05."""
    law = torch.tensor([[0.83, 0.10, 0.07]] * 2).log()
    params = SamplingParams(temperature=1.0, verification="typical")
    end = decide(DraftTree.chain(0, [token]), law, params, None, 0)
    assert (len(end.path) == 2) == accepted


@pytest.mark.parametrize("token, accepted", [(1, True), (0, False)])
def test_typical_threshold_falls_with_the_entropy(token, accepted):
    """H is 3.0 here: the bar is 0.3 exp(-H) = 0.015, between the two drafts."""
    law = torch.tensor([[0.012, 0.018] + [0.97 / 19] * 19] * 2).log()
    params = SamplingParams(temperature=1.0, verification="typical")
    end = decide(DraftTree.chain(0, [token]), law, params, None, 0)
    assert (len(end.path) == 2) == accepted


def test_typical_takes_the_longest_path_and_of_equals_the_likelier():
    params = SamplingParams(temperature=1.0, verification="typical")
    law = torch.tensor([0.5, 0.3, 0.2]).log()
    end = decide(DraftTree((0, 1, 0), (-1, 0, 0), (0, 1, 1)), law.expand(3, 3), params, None, 0)
    assert end.path == (0, 2)
    end = decide(DraftTree((0, 0, 1, 2), (-1, 0, 0, 2), (0, 1, 1, 2)), law.expand(4, 3), params, None, 0)
    assert end.path == (0, 2, 3)


def test_typical_is_lossy():
    params = SamplingParams(temperature=1.0, verification="typical")
    assert rejection_error([(BUSHY, 1.0)], Toy(3, 7), 3, params=params) > WRONG


def test_nodes_processed_at_once_decide_like_nodes_processed_on_demand():
    """What runs on a GPU, where each visit would wait for the device, run here."""
    for name in SETTINGS:
        params, logits = params_for(name), node_logits(Toy(3, 2), BUSHY)
        processors = Processors.build(params, len(PROMPT), EOS)
        lazy, eager = (rules._Target(BUSHY, logits, params, ROOT, processors, PROMPT) for _ in range(2))
        eager.lazy = False
        assert lazy.coupled(None) == eager.coupled(None)
        for node in range(len(BUSHY)):
            assert torch.equal(lazy.law(node), eager.law(node))
