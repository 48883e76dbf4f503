"""The cost model against scripted clocks: what it picks, and what a bad drafter may cost."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from runtime.calibration import Calibration
from runtime.cost import CREDIT, SHARE, CostModel, _gains
from runtime.cost_table import CostTable, Measured, widths
from runtime.deepening import HOPE
from runtime.proposers.base import Budget
from runtime.sampling import DraftNoise, Noise
from runtime.tree import DraftTree

FLAT = {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.02, 6: 1.08, 8: 1.13, 12: 1.27, 16: 1.43}  # bf16 on a CPU with its instructions
CLIFF = {1: 1.0, 2: 2.1, 3: 2.2, 4: 2.4, 6: 2.2, 8: 2.1, 12: 2.3, 16: 2.6}  # fp32, packed on every call
DEPTH, NODES = 5, 16


def model(
    verify: dict[int, float] = FLAT, step: float = 0.04, batch: int = 1, growth: float = 0.0, asking: bool = False
) -> CostModel:
    """A cost model that knows the true costs: a draft takes `step` plain rounds per level."""
    measured = Measured(
        {(b, w): s * (1 + growth * (b - 1)) for b in {1, batch} for w, s in verify.items()},
        {(b, d): step * d for b in {1, batch} for d in (1, DEPTH)},
    )
    return CostModel(CostTable(measured, batch, NODES, DEPTH), Calibration(), DEPTH, asking)


def chain(raws: list[float], source: str = "x") -> DraftTree:
    scores = [0.0, *itertools.accumulate(math.log(raw) for raw in raws)]
    count = len(scores)
    names = ("", *[source] * (count - 1))
    return DraftTree(tuple(range(count)), tuple(range(-1, count - 1)), tuple(range(count)), tuple(scores), names)


def bush(claims: list[float], depth: int) -> DraftTree:
    """Every level hangs below the best node of the one above; `claims` are its conditional probabilities."""
    parents, depths, scores, tip = [-1], [0], [0.0], 0
    for level in range(1, depth + 1):
        first = len(parents)
        parents += [tip] * len(claims)
        depths += [level] * len(claims)
        scores += [scores[tip] + math.log(claim) for claim in claims]
        tip = first
    return DraftTree(
        tuple(range(len(parents))), tuple(parents), tuple(depths), tuple(scores), ("", *["x"] * (len(parents) - 1))
    )


@dataclass
class World:
    """Rounds on a scripted clock; truth(tree, node, round): probability that a node is accepted, given its parent."""

    model: CostModel
    draw: object  # depth -> DraftTree
    truth: object  # (tree, node, round) -> probability given its parent
    verify: dict[int, float] = field(default_factory=lambda: FLAT)
    step: float = 0.04
    measured: bool = True  # the model knows the costs
    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    widths: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    def run(self, rounds: int, seed: int = 0) -> World:
        rng = random.Random(seed)
        for _ in range(rounds):
            budget = self.model.plan({0: Budget(NODES, DEPTH)})[0]
            drawn = self.draw(budget.depth) if budget.depth else DraftTree.root(0)
            depth = budget.depth
            if budget.deeper is not None:
                depth = asked_depth(drawn, budget)
                drawn = drawn.part([node for node in range(len(drawn)) if drawn.depths[node] <= depth])
            tree = self.model.trim({0: drawn})[0]
            path = self._accept(tree, rng)
            draft, rest = depth * self.step, self.verify[self.model.table.width(len(tree))]
            self.model.observe({0: tree}, {0: path}, draft, rest)
            self.seconds += draft + rest
            self.tokens += len(path)
            self.widths.append(len(tree))
            self.depths.append(depth)
            self.rounds += 1
            if self.measured:  # then the bound is exact
                assert self.model.explored <= SHARE * self.model.seconds + 1e-9
        return self

    def _accept(self, tree: DraftTree, rng: random.Random) -> tuple[int, ...]:
        path = [0]
        while True:
            u, found = rng.random(), None
            for child in (n for n in range(1, len(tree)) if tree.parents[n] == path[-1]):
                u -= self.truth(tree, child, self.rounds)
                if u < 0:
                    found = child
                    break
            if found is None:
                return tuple(path)
            path.append(found)

    @property
    def against_plain(self) -> float:
        return self.seconds / (self.tokens * self.verify[1])


def asked_depth(tree: DraftTree, budget: Budget) -> int:
    """The levels of a tree that a proposer drafts which asks before each."""
    for level in range(1, budget.depth):
        best = max(math.exp(tree.scores[node]) for node in range(len(tree)) if tree.depths[node] == level)
        if not budget.deeper("x", level, {0: best}):
            return level
    return budget.depth


def never(tree: DraftTree, node: int, number: int) -> float:
    return 0.0


ASKING = pytest.mark.parametrize("asking", [False, True], ids=["by-depth", "by-level"])

# ---- never slower than plain ------------------------------------------------------------------------------------


@ASKING
@pytest.mark.parametrize("verify", [FLAT, CLIFF], ids=["flat", "cliff"])
@pytest.mark.parametrize("claim", [1.0, 0.5, 0.01])
@pytest.mark.parametrize("step", [0.001, 0.04, 0.2])
def test_random_drafts_cost_at_most_three_percent_whatever_they_claim(verify, claim, step, asking):
    world = World(model(verify, step, asking=asking), lambda depth: chain([claim] * depth), never, verify, step)
    assert world.run(1000).against_plain <= 1.03


@ASKING
@pytest.mark.parametrize("step", [1.0, 5.0, 50.0])
def test_a_slow_drafter_costs_at_most_three_percent_though_it_is_always_right(step, asking):
    world = World(model(FLAT, step, asking=asking), lambda depth: chain([0.9] * depth), lambda *_: 1.0, FLAT, step)
    assert world.run(1000).against_plain <= 1.03


@ASKING
def test_a_drafter_measured_fast_that_turns_slow_is_found_out(asking):
    # Measured at .04 per level, a level now takes 2 plain rounds: five levels buy six tokens for eleven.
    world = World(
        model(FLAT, 0.04, asking=asking), lambda depth: chain([0.9] * depth), lambda *_: 1.0, FLAT, 2.0, False
    )
    assert world.run(2000).against_plain <= 1.05
    assert sum(world.depths[-500:]) == 0 or world.run(1000).against_plain <= 1.03


@ASKING
def test_a_drafter_that_turns_bad_is_dropped_past_gains_pay_for_nothing(asking):
    world = World(
        model(asking=asking), lambda depth: chain([0.7] * depth), lambda tree, node, number: 0.7 * (number < 500)
    )
    world.run(500)
    tokens, seconds = world.tokens, world.seconds
    world.run(1000)
    lost = (world.seconds - seconds) - (world.tokens - tokens)
    assert lost <= CREDIT + 2 * SHARE * world.seconds + 1.0
    # One level costs so little that its share allows a try in every fourth round, five levels one in twenty.
    assert np.mean(np.array(world.depths[-300:]) == 0) > (0.7 if asking else 0.9)


@ASKING
def test_a_drafter_that_turns_good_is_taken_up_again(asking):
    world = World(
        model(asking=asking), lambda depth: chain([0.7] * depth), lambda tree, node, number: 0.7 * (number >= 500)
    )
    world.run(1500)
    assert np.mean(np.array(world.depths[-300:]) > 0) > 0.9
    assert world.tokens / world.rounds > 1.5


@ASKING
def test_exploring_a_losing_drafter_goes_on_but_stays_within_its_share(asking):
    losing = model(CLIFF, 0.2, asking=asking)
    world = World(losing, lambda depth: chain([0.3] * depth), lambda *_: 0.1, CLIFF, 0.2).run(3000)
    drafted = [number for number, width in enumerate(world.widths) if width > 1]
    assert max(drafted) > 2500  # never given up for good
    assert world.model.explored <= SHARE * world.seconds
    assert world.against_plain <= 1 + 2 * SHARE + CREDIT / 3000


# ---- the best choice --------------------------------------------------------------------------------------------


def fixed(depth: int, width: int, truth: float, step: float, verify: dict[int, float]) -> float:
    """Seconds per token of drafting chains of one length for ever."""
    count = min(depth, width - 1)
    tokens = sum(truth**k for k in range(count + 1))
    return (depth * step + verify[next(w for w in verify if w >= count + 1)]) / tokens


@pytest.mark.parametrize(("truth", "step"), [(0.3, 0.04), (0.6, 0.04), (0.8, 0.1), (0.6, 0.3)])
@pytest.mark.parametrize("verify", [FLAT, CLIFF], ids=["flat", "cliff"])
def test_the_best_fixed_choice_is_nearly_reached(truth, step, verify):
    world = World(model(verify, step), lambda depth: chain([0.5] * depth), lambda *_: truth, verify, step).run(1500)
    seconds, tokens = world.seconds, world.tokens
    world.run(1500)
    best = min(fixed(d, d + 1, truth, step, verify) for d in range(DEPTH + 1))
    assert (world.seconds - seconds) / (world.tokens - tokens) <= 1.05 * best


def test_drafts_that_come_and_go_are_taken_when_they_come():
    # A lookup: one round in ten has a match of five right tokens, drafting is free.
    rng = random.Random(3)

    def lookup(depth: int) -> DraftTree:
        return chain([0.9] * depth) if rng.random() < 0.1 else DraftTree.root(0)

    world = World(model(CLIFF, 1e-5), lookup, lambda *_: 0.95, CLIFF, 1e-5).run(2000)
    matched = np.mean(np.array(world.widths) > 1)
    assert 0.07 < matched < 0.13
    assert world.against_plain < 0.8


def test_no_draft_is_a_candidate_of_every_round():
    losing = model(CLIFF)
    losing.plan({0: Budget(NODES, DEPTH)})
    assert len(losing.trim({0: chain([0.5])})[0]) == 1  # 1.5 tokens for 2.1 plain rounds
    losing.plan({0: Budget(NODES, DEPTH)})
    assert len(losing.trim({0: chain([0.9] * 5)})[0]) == 6  # 4.7 tokens for 2.2


def brute_force(trees: list[DraftTree], paths: list[list[float]], draft: float, table: CostTable) -> float:
    """The best rate over all widths, each tree giving its best closed set of nodes (paths never rise going down)."""
    rates = []
    for width in table.widths:
        tokens = sum(sum(sorted(path, reverse=True)[:width]) for path in paths)
        rates.append(tokens / (draft + table.verify(width, len(trees))))
    return max(rates)


@pytest.mark.parametrize("seed", range(20))
def test_trees_are_cut_to_the_best_rate_of_the_whole_batch(seed):
    rng = random.Random(seed)
    batch = 4
    wide = model(FLAT, 0.04, batch, growth=0.5)
    trees = {}
    for row in range(batch):
        parents, depths, scores = [-1], [0], [0.0]
        for _ in range(rng.randrange(NODES)):  # ragged, some empty
            parent = rng.randrange(len(parents))
            if depths[parent] < DEPTH:
                parents.append(parent)
                depths.append(depths[parent] + 1)
                scores.append(scores[parent] + math.log(rng.choice((0.05, 0.3, 1.0))))
        names = ("", *["x"] * (len(parents) - 1))
        trees[row] = DraftTree(tuple(range(len(parents))), tuple(parents), tuple(depths), tuple(scores), names)
    wide.plan({row: Budget(NODES, DEPTH) for row in range(batch)})
    kept = wide.trim(trees)
    paths = [wide.calibration.path_probabilities(trees[row]) for row in range(batch)]
    draft = wide.table.draft(DEPTH, batch)
    width = max(map(len, kept.values()))
    rate = sum(wide.expected.values()) / (draft + wide.table.verify(width, batch))
    assert rate == pytest.approx(brute_force(list(trees.values()), paths, draft, wide.table), rel=1e-12)
    for row, tree in kept.items():
        again = wide.calibration.path_probabilities(tree)
        assert len(tree) == min(len(trees[row]), wide.table.width(width))
        assert set(tree.tokens) <= set(trees[row].tokens) and len(again) == len(tree)


def test_a_cut_tree_keeps_tokens_scores_and_sources_of_what_it_keeps():
    tree = DraftTree(
        (9, 1, 2, 3, 4), (-1, 0, 0, 1, 2), (0, 1, 1, 2, 2), (0.0, -3.0, -0.1, -4.0, -0.2), ("", "a", "b", "a", "b")
    )
    assert tree.part([0, 2, 4]) == DraftTree((9, 2, 4), (-1, 0, 1), (0, 1, 2), (0.0, -0.1, -0.2), ("", "b", "b"))


def test_a_draft_already_paid_for_is_worth_verifying_where_a_free_one_is_not():
    """1.4 tokens in 3.5 plain rounds beat 1 in 3; without the draft's 2, 1.4 in 1.5 would lose to 1 in 1."""
    costs = {width: 1.0 if width == 1 else 1.5 + 0.1 * (width - 2) for width in widths(NODES)}
    found = model(costs, step=2.0)
    assert found.plan({0: Budget(2, 1)})[0].depth == 1
    assert len(found.trim({0: chain([0.4])})[0]) == 2
    free = model(costs, step=1e-6)
    assert free.plan({0: Budget(2, 1)})[0].depth == 1
    assert len(free.trim({0: chain([0.4])})[0]) == 1


@pytest.mark.parametrize(("chance", "depth"), [(0.2625, 0), (0.3, 1)], ids=["1% more than plain", "4% more"])
def test_a_draft_that_promises_next_to_nothing_is_not_believed(chance, depth):
    """The best of many estimates flatters: at break-even drafting loses what its estimates are wrong by."""
    found = model({width: 1.0 if width == 1 else 1.2 for width in widths(NODES)}, step=0.05)
    assert found.plan({0: Budget(2, 1)})[0].depth == 1  # on credit
    tree = found.trim({0: chain([chance])})[0]
    found.observe({0: tree}, {0: (0,)}, 0.05, 1.2)
    assert found.plan({0: Budget(2, 1)})[0].depth == depth


def test_equals_keep_their_parents():
    sure = chain([1.0] * 5)
    some = model({1: 1.0, 2: 1.0, 3: 1.0, 4: 4.0, 6: 4.0, 8: 4.0, 12: 4.0, 16: 4.0})
    some.plan({0: Budget(NODES, DEPTH)})
    assert some.trim({0: sure})[0].tokens == (0, 1, 2)


def test_gains_are_sums_of_the_best():
    paths = np.array([[[1.0, 0.2, 0.5], [1.0, 0.3, 0.0]], [[1.0, 0.2, 0.0], [1.0, 0.0, 0.0]]])
    found = _gains(paths, np.array([1, 2, 3, 4]))
    assert found[0].tolist() == pytest.approx([2.0, 2.8, 3.0, 3.0])
    assert found[1].tolist() == pytest.approx([2.0, 2.2, 2.2, 2.2])


def test_expected_tokens_are_those_of_the_kept_nodes():
    some = model()
    some.plan({0: Budget(NODES, DEPTH)})
    tree = some.trim({0: bush([0.6, 0.2], 2)})[0]
    assert some.expected == {0: pytest.approx(sum(Calibration().path_probabilities(tree)))}


# ---- plans ------------------------------------------------------------------------------------------------------


def test_plans_stay_within_what_was_asked_for():
    some = model(batch=4)
    asked = {0: Budget(16, 5), 1: Budget(4, 2), 2: Budget(1, 0)}
    planned = some.plan(asked)
    for row, budget in planned.items():
        assert budget.nodes <= asked[row].nodes and budget.depth <= asked[row].depth
    assert planned[2] == Budget(1, 0) and planned[0].depth == 5
    assert some.plan({0: Budget(1, 0)}) == {0: Budget(1, 0)}


def test_noise_and_the_drawn_mark_are_handed_on():
    noise = DraftNoise(Noise(0, 8), 3, 1.0)
    planned = model().plan({0: Budget(16, 5, noise, True)})[0]
    assert planned.noise is noise and planned.drawn


def test_a_drawn_tree_is_verified_whole():
    probs = torch.full((6, 8), 0.125, dtype=torch.float64)
    hopeless = chain([1e-6] * 5)
    drawn = DraftTree(hopeless.tokens, hopeless.parents, hopeless.depths, hopeless.scores, hopeless.sources, probs)
    some = model(CLIFF, batch=2)
    some.plan({0: Budget(16, 5, None, True), 1: Budget(16, 5)})
    kept = some.trim({0: drawn, 1: chain([1e-6] * 5)})
    assert kept[0] is drawn
    assert some.expected[0] == pytest.approx(1.0, abs=1e-5)


def test_the_size_of_a_drawn_tree_is_settled_before_it_is_drawn():
    some = model()
    for _ in range(20):
        budget = some.plan({0: Budget(16, 5, None, True)})[0]
        grown = chain([0.3] * min(budget.depth, budget.nodes - 1))
        tree = DraftTree(
            grown.tokens, grown.parents, grown.depths, grown.scores, grown.sources, torch.zeros(len(grown), 8)
        )
        some.observe(some.trim({0: tree}), {0: (0, 1) if len(tree) > 1 else (0,)}, 0.2, FLAT[6])
    assert budget.depth and budget.nodes < 16


def test_greedy_and_sampled_batches_are_judged_apart():
    noise = DraftNoise(Noise(0, 8), 3, 1.0)
    some = model(CLIFF)
    for _ in range(200):
        some.plan({0: Budget(16, 5)})
        tree = some.trim({0: chain([0.5] * 5)})[0]
        some.observe({0: tree}, {0: (0,)}, 0.0, CLIFF[some.table.width(len(tree))])
    assert some.plan({0: Budget(16, 5)})[0].depth == 0
    assert some.plan({0: Budget(16, 5, noise)})[0].depth == 5


def test_the_cost_of_a_plain_round_is_looked_at_again():
    world = World(model(), lambda depth: chain([0.9] * depth), lambda *_: 0.9).run(600)
    # After 4, 8, 16, 32, 64 drafted rounds, then after every 128: 124 + 3 * 128 and 8 plain ones in 600.
    assert sum(depth == 0 for depth in world.depths) == 8


def test_deeper_drafts_are_looked_at_again():
    # Only the first level is worth anything until round 400, then all five are.
    def truth(tree: DraftTree, node: int, number: int) -> float:
        return 0.8 if tree.depths[node] == 1 or number > 400 else 0.0

    world = World(model(FLAT, 0.1), lambda depth: chain([0.8] * depth), truth, FLAT, 0.1).run(400)
    assert np.mean(np.array(world.depths[-100:]) <= 2) > 0.8
    world.run(1600)
    assert np.mean(np.array(world.depths[-100:]) == 5) > 0.8


def test_the_model_follows_costs_that_change():
    # Measured flat, wide forwards really cost three plain rounds: five levels at .5 no longer pay.
    real = dict(zip(FLAT, [1.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]))
    world = World(model(FLAT), lambda depth: chain([0.5] * depth), lambda *_: 0.5, real, 0.04, False).run(1500)
    assert np.mean(np.array(world.widths[-300:]) == 1) > 0.9


def test_the_widths_that_are_run_are_few():
    world = World(model(), lambda depth: bush([0.4, 0.2, 0.1], depth), lambda tree, node, number: 0.25).run(500)
    assert {world.model.table.width(width) for width in world.widths} <= set(widths(NODES))


# ---- level by level ---------------------------------------------------------------------------------------------


def moody(seed: int, easy: float = 0.9, hard: float = 0.2) -> tuple[object, object]:
    """A drafter that knows whether the text is easy; half of the rounds are."""
    rng = random.Random(seed)
    return lambda depth: chain([easy if rng.random() < 0.5 else hard] * depth), lambda tree, node, number: math.exp(
        tree.scores[node] - tree.scores[tree.parents[node]]
    )


@pytest.mark.parametrize("step", [0.05, 0.15])
def test_a_drafter_that_asks_goes_deep_where_it_is_sure_and_beats_every_fixed_depth(step):
    draw, truth = moody(1)
    by_level = World(model(FLAT, step, asking=True), draw, truth, FLAT, step).run(3000)
    draw, truth = moody(1)
    by_depth = World(model(FLAT, step), draw, truth, FLAT, step).run(3000)
    assert by_level.against_plain < 0.97 * by_depth.against_plain
    assert {1, DEPTH} <= set(by_level.depths[-200:])
    # The best there is: one level, then all five in an easy round and none more in a hard one.
    easy, hard = sum(0.9**k for k in range(6)), 1.2
    seconds = [DEPTH * step + FLAT[6], step + FLAT[2]]
    assert by_level.against_plain <= 1.05 * sum(seconds) / (easy + hard)


def test_levels_that_gave_nothing_are_tried_again():
    def truth(tree: DraftTree, node: int, number: int) -> float:
        return 0.9 if tree.depths[node] == 1 or number > 500 else 0.0

    world = World(model(FLAT, 0.1, asking=True), lambda depth: chain([0.9] * depth), truth, FLAT, 0.1).run(500)
    assert np.mean(np.array(world.depths[-100:]) <= 1) > 0.9
    world.run(1000)
    assert np.mean(np.array(world.depths[-100:]) == DEPTH) > 0.9


def test_a_level_pays_for_its_time_and_its_node():
    some = model(FLAT, 0.1, asking=True)
    some.plan({0: Budget(NODES, DEPTH)})
    node = (FLAT[8] - FLAT[1]) / 7
    enough = (0.1 + node) / HOPE  # one token per plain round is what else the time would give
    deeper = some.plan({0: Budget(NODES, DEPTH)})[0].deeper
    assert not deeper("x", 1, {0: 0.99 * enough})
    assert deeper("x", 1, {0: 1.01 * enough})
    assert not deeper("x", 2, {0: 0.5 * enough})
    two = model(FLAT, 0.1, batch=2, asking=True)
    deeper = two.plan({row: Budget(NODES, DEPTH) for row in range(2)})[1].deeper
    assert deeper("x", 1, {0: 1.01 * enough, 1: 1.01 * enough})  # two rows emit two tokens per plain round
    assert not deeper("x", 1, {0: 1.01 * enough})


def test_only_drafts_of_the_one_that_asked_speak_for_its_levels():
    for source, better in (("x", True), ("y", False)):
        some = model(FLAT, 0.1, asking=True)
        before = some.deepening.worth(1, False)
        deeper = some.plan({0: Budget(NODES, DEPTH)})[0].deeper
        assert deeper("x", 1, {0: 0.9})
        mixed = chain([0.9, 0.9])
        mixed = DraftTree(mixed.tokens, mixed.parents, mixed.depths, mixed.scores, ("", "x", source))
        tree = some.trim({0: mixed})[0]
        some.observe({0: tree}, {0: (0, 1, 2)}, 0.2, FLAT[3])
        assert (some.deepening.worth(1, False) > before) == better


def test_time_of_a_draft_is_booked_on_the_levels_that_were_drafted():
    some = model(FLAT, 0.1, asking=True)
    deeper = some.plan({0: Budget(NODES, DEPTH)})[0].deeper
    assert deeper("x", 1, {0: 0.9})
    tree = some.trim({0: chain([0.9, 0.9])})[0]
    some.observe({0: tree}, {0: (0,)}, 0.3, FLAT[3])
    drafts = some.table.drafts(DEPTH, 1)
    assert drafts[1] > 1.1 * drafts[0] * 2 and drafts[4] == pytest.approx(drafts[2] / 3 * 5)


def test_drawn_trees_are_never_asked_about():
    some = model(batch=2, asking=True)
    planned = some.plan({0: Budget(16, 5, None, True), 1: Budget(16, 5)})
    assert planned[0].deeper is None and planned[1].deeper is None
    assert some.plan({0: Budget(16, 5)})[0].deeper is not None
    assert model().plan({0: Budget(16, 5)})[0].deeper is None  # nor is a proposer that does not heed it
