"""What the enumeration must see: each known wrong rule, wrong coins, and acceptance in a closed toy model."""

import itertools

import pytest
import torch

from runtime import rules
from runtime.rules import Chance, decide
from runtime.sampling import DraftNoise, Noise, SamplingParams, keyed_gumbel
from runtime.tree import DraftTree
from runtime.verify import Verification
from tests.runtime.enumeration import (
    Toy,
    by_law,
    drawn,
    node_logits,
    rejection_error,
)

EXACT = 1e-12
WRONG = 1e-3  # the wrong rules are off by far more than rounding
BUSHY = DraftTree((0, 0, 1, 1, 2, 0), (-1, 0, 0, 1, 1, 2), (0, 1, 1, 2, 2, 2))
REJECTION = SamplingParams(temperature=1.0, verification="rejection")


# ---- wrong rules seen in public runtimes


def _wrong(keep_q: bool = False, fall_back: bool = True, normalise: bool = True, one_hot: bool = False):
    """The without-replacement rule with one fault, on trees that may hold a child twice."""

    def rule(tree, law, chance) -> Verification:
        node, path = 0, [0]
        while True:
            p, q = law(node).clone(), tree.draft_probs[node].clone()
            for child in (n for n in range(1, len(tree)) if tree.parents[n] == node):
                token = tree.tokens[child]
                given = 1.0 if one_hot else float(q[token])
                if given and chance.accept(min(1.0, float(p[token]) / given)):
                    break
                left = (p - q).clamp(min=0)
                p = left / left.sum() if not fall_back or left.sum() > 0 else p
                if not keep_q:
                    q[token] = 0
                    q = q / q.sum() if normalise else q
            else:
                return Verification(tuple(path), chance.draw(p))
            node = child
            path.append(child)

    return rule


def test_the_faulty_rule_without_its_faults_is_exact():
    target = Toy(4, 7)
    assert rejection_error(drawn(Toy(4, 8), (3,)), target, 2, by_law(_wrong(), target)) < EXACT


def test_unchanged_q_is_caught():
    target = Toy(4, 7)
    assert rejection_error(drawn(Toy(4, 8), (2,)), target, 2, by_law(_wrong(keep_q=True), target)) > WRONG


def test_q_not_normalised_is_caught():
    target = Toy(4, 7)
    assert rejection_error(drawn(Toy(4, 8), (2,)), target, 2, by_law(_wrong(normalise=False), target)) > WRONG


def test_a_one_hot_ratio_with_a_dense_residual_is_caught():
    target = Toy(4, 7)
    assert rejection_error(drawn(Toy(4, 8), (2,)), target, 2, by_law(_wrong(one_hot=True), target)) > WRONG


def test_residual_of_nothing_is_caught():
    """q a last bit above p at the draft: the coin may fail and (p - q)+ is empty, 0/0 without the fallback."""
    p = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    q = p.clone()
    q[0] = torch.nextafter(q[0], torch.tensor(1.0, dtype=torch.float64))
    q /= q.sum()
    left = (p - q).clamp(min=0)
    assert float(p[0] / q[0]) < 1 and float(left.sum()) == 0
    chain = DraftTree((0, 0), (-1, 0), (0, 1), draft_probs=torch.stack([q, q]))

    class Refuse:
        def accept(self, probability):
            return False

        def draw(self, weights):
            return int(weights.argmax()) if weights.isfinite().all() else -1

    for rule, token in ((rules.without_replacement, 2), (rules.block, 2), (_wrong(fall_back=False), -1)):
        assert rule(chain, lambda node: p, Refuse()).next_token == token


@pytest.mark.parametrize(
    "fault, counts",
    [
        (lambda tokens, q: q.topk(len(tokens)).indices.tolist(), (1,)),
        (lambda tokens, q: q.topk(len(tokens)).indices.tolist(), (2,)),
        (lambda tokens, q: sorted(tokens, key=lambda token: -q[token]), (2,)),
        (lambda tokens, q: sorted(tokens, key=lambda token: -q[token])[:1], (3,)),
        (lambda tokens, q: sorted(tokens, key=lambda token: -q[token])[:2], (3,)),
        (lambda tokens, q: [t for t in tokens if q[t] == q[tokens].max()], (2, 1)),
    ],
    ids=["argmax and q", "top-k and q", "sorted by q", "best of 3", "best 2 of 3", "pruned in a deep tree"],
)
def test_trees_chosen_after_drawing_are_caught(fault, counts):
    assert rejection_error(drawn(Toy(4, 8), counts, fault), Toy(4, 7), len(counts) + 1) > WRONG


def test_the_first_two_of_three_draws_are_exact():
    assert rejection_error(drawn(Toy(4, 8), (3,), lambda tokens, q: tokens[:2]), Toy(4, 7), 2) < EXACT


def test_draws_with_replacement_are_caught():
    target = Toy(4, 7)
    assert rejection_error(drawn(Toy(4, 8), (2,), iid=True), target, 2, by_law(_wrong(), target)) > WRONG
    # with q left alone it is SpecInfer's rule, and right
    assert rejection_error(drawn(Toy(4, 8), (2,), iid=True), target, 2, by_law(_wrong(keep_q=True), target)) < EXACT
    with pytest.raises(ValueError, match="twice"):
        DraftTree((0, 1, 1), (-1, 0, 0), (0, 1, 1))


def test_block_verification_with_the_token_coins_is_caught():
    """h_i = p_i at every i, as if each prefix were the last."""

    def rule(tree, law, chance):
        keep, kept, residuals = [1.0], 1.0, []
        for node in range(len(tree) - 1):
            p, q = law(node), tree.draft_probs[node]
            residuals.append((kept * p - q).clamp(min=0))
            token = tree.tokens[node + 1]
            kept = min(1.0, kept * float(p[token] / q[token]))
            keep.append(kept)
        residuals.append(law(len(tree) - 1))
        length = next(i for i in range(len(tree) - 1, -1, -1) if i == 0 or chance.accept(keep[i]))
        return Verification(tuple(range(length + 1)), chance.draw(residuals[length]))

    target = Toy(3, 7)
    assert rejection_error(drawn(Toy(3, 8), (1, 1)), target, 3, by_law(rule, target)) > WRONG


def test_a_draft_its_law_cannot_give_is_refused():
    probs = torch.tensor([[0.5, 0.5, 0.0]] * 3, dtype=torch.float64)
    chain = DraftTree((0, 2), (-1, 0), (0, 1), draft_probs=probs[:2])
    bush = DraftTree((0, 0, 2), (-1, 0, 0), (0, 1, 1), draft_probs=probs)
    target = torch.tensor([[0.0, 0.0, 9.0]] * 3)
    with pytest.raises(ValueError, match="node 1 has token 2.*probability 0.0"):
        decide(chain, target[:2], REJECTION, None, 5)
    with pytest.raises(ValueError, match="node 2 has token 2"):
        decide(bush, target, REJECTION, None, 5)


# ---- chance


class Grid(Chance):
    """Every k/n in turn where chance would be."""

    def __init__(self, n: int):
        super().__init__(0, 0)
        self.values = itertools.cycle([k / n for k in range(n)])

    def _uniform(self) -> float:
        return next(self.values)


def coin_error(chance: Chance) -> float:
    return max(abs(sum(chance.accept(k / 8) for _ in range(8)) / 8 - k / 8) for k in range(9))


def test_the_coin_is_exact_on_a_grid():
    assert coin_error(Grid(8)) == 0

    class Loose(Grid):
        def accept(self, probability):
            return self._uniform() <= probability

    assert coin_error(Loose(8)) > 0
    assert not Grid(1).accept(0.0)  # u = 0 against p = 0


def test_draws_are_exact_on_a_grid_and_never_of_weight_nothing():
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 5.0, 0.0], dtype=torch.float64)
    grid = Grid(8)
    counts = torch.bincount(torch.tensor([grid.draw(weights) for _ in range(8)]), minlength=6)
    assert counts.tolist() == weights.tolist()

    class Last(Grid):
        def _uniform(self):
            return 1 - 2.0**-53

    for scale in (1.0, 0.1, 3.0, 1e-300):
        assert Last(1).draw(weights * scale) == 4


def test_chance_is_a_function_of_seed_position_and_order():
    def stream(seed, position):
        chance = Chance(seed, position)
        return [chance._uniform() for _ in range(4)]

    assert stream(3, 5) == stream(3, 5)
    flat = [u for key in ((3, 5), (3, 6), (4, 5), (35, 0), (-3, 5)) for u in stream(*key)]
    assert len(set(flat)) == len(flat)
    assert all(0 <= u < 1 for u in flat)
    many = torch.tensor([Chance(0, position)._uniform() for position in range(5000)])
    assert abs(many.mean() - 0.5) < 4 * (1 / 12 / 5000) ** 0.5
    # not the target's noise under another name
    gumbel = torch.stack([keyed_gumbel(0, position, 1)[0] for position in range(5000)])
    assert abs(torch.corrcoef(torch.stack([many, gumbel.float()]))[0, 1]) < 4 / 5000**0.5


def test_seeded_rejection_repeats():
    logits = node_logits(Toy(3, 1), BUSHY)
    for seed in range(20):
        params = SamplingParams(temperature=1.0, seed=seed, verification="rejection")
        assert decide(BUSHY, logits, params, None, 4) == decide(BUSHY, logits, params, None, 4)
    ends_at = {
        decide(BUSHY, logits, SamplingParams(temperature=1.0, seed=s, verification="rejection"), None, p)
        for s, p in itertools.product(range(8), range(8))
    }
    assert len(ends_at) > 3


# ---- a closed toy model


@pytest.mark.parametrize(
    "distance, top, rejected, coupled",
    [
        (0.3, (0.44, 0.53, 0.62), (0.92, 0.95, 0.98), (0.88, 0.97, 0.998)),
        (0.9, (0.39, 0.47, 0.57), (0.73, 0.82, 0.89), (0.68, 0.83, 0.93)),
    ],
    ids=["close", "far"],
)
def test_toy_table(distance, top, rejected, coupled):
    """Acceptance at depth 1 of 1, 2 and 4 children, V = 200, mean max p 0.44: normal logits with one token raised.

    Scale, raise and distance are set so that the top-k masses are the expected ones; the other columns follow.
    """
    count, vocab = 1500, 200
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(count, vocab, generator=generator, dtype=torch.float64)
    logits[:, 0] += 6.5
    drafter = logits + distance * torch.randn(count, vocab, generator=generator, dtype=torch.float64)
    laws, q = logits.softmax(-1), drafter.softmax(-1)
    ranks = {"rejection": torch.zeros(4), "coupled": torch.zeros(4)}
    for verification, hits in ranks.items():
        params = SamplingParams(temperature=1.0, seed=1, verification=verification)
        own = Noise(1, vocab)
        for i in range(count):
            other = Noise(1, vocab, salt=("draw", i)) if verification == "rejection" else own
            ids = (q[i].log() + DraftNoise(other, i, 1.0).at(1)).topk(4).indices.tolist()
            probs = q[i].expand(5, -1) if verification == "rejection" else None
            tree = DraftTree((0, *ids), (-1, 0, 0, 0, 0), (0, 1, 1, 1, 1), draft_probs=probs)
            end = decide(tree, logits[i].expand(5, -1), params, own, i)
            own.forget(i + 1)
            if len(end.path) > 1:
                hits[end.path[1] - 1] += 1 / count
    found = {name: hits.cumsum(0)[[0, 1, 3]].tolist() for name, hits in ranks.items()}
    masses = [float(laws.gather(1, q.topk(k).indices).sum(1).mean()) for k in (1, 2, 4)]
    assert masses == pytest.approx(top, abs=0.03)
    assert found["rejection"] == pytest.approx(rejected, abs=0.03)
    assert found["coupled"] == pytest.approx(coupled, abs=0.03)
