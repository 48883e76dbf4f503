"""Exact laws on toy vocabularies: every outcome of every coin, draw and noise, with its weight."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from runtime import rules
from runtime.processors import Processors
from runtime.sampling import SamplingParams
from runtime.tree import DraftTree
from runtime.verify import Verification

Text = tuple[int, ...]
PROMPT: Text = (0, 1, 0)
ROOT = len(PROMPT) - 1  # the root is the prompt's last token
EOS = (2,)
SETTINGS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 2, "temperature": 1.3},
    "top_p": {"top_p": 0.8, "temperature": 1.6},
    "min_p": {"min_p": 0.3, "temperature": 1.2},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "presence_penalty": {"presence_penalty": 0.9},
    "frequency_penalty": {"frequency_penalty": -1.1},
    "logit_bias": {"logit_bias": {1: 0.8, 0: -0.6}},
    "min_tokens": {"min_tokens": 2},
    "bad_words": {"bad_words": ((0, 1), (1, 1, 0))},
    "all": {
        "temperature": 0.9, "top_k": 2, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2, "min_tokens": 1,
        "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": {1: 0.5}, "bad_words": ((0, 0),),
    },
}  # fmt: skip


def params_for(name: str, verification: str = "coupled") -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "verification": verification} | SETTINGS[name])


class Toy:
    """A target or drafter whose logits [V], fp64, are any function of the whole text."""

    def __init__(self, vocab: int, seed: int, scale: float = 1.0):
        self.vocab, self.seed, self.scale = vocab, seed, scale

    def logits(self, text: Text) -> Tensor:
        rng = random.Random(f"{self.seed}/{text}")
        return torch.tensor([rng.gauss(0, self.scale) for _ in range(self.vocab)], dtype=torch.float64)

    def law(self, text: Text) -> Tensor:
        return self.logits(text).softmax(-1)


def paths(tree: DraftTree) -> list[Text]:
    """Tokens below the root on the way to each node, the node's own included."""
    found: list[Text] = [()]
    for node in range(1, len(tree)):
        found.append((*found[tree.parents[node]], tree.tokens[node]))
    return found


def node_logits(target: Toy, tree: DraftTree) -> Tensor:
    return torch.stack([target.logits((*PROMPT, *path)) for path in paths(tree)])


# ---- the law of plain decoding


def reference(params: SamplingParams, text: Text, scores: Tensor) -> Tensor:
    """transformers' processors in transformers' order on one history, then the temperature and the warpers."""
    chain = hf.LogitsProcessorList()
    if params.logit_bias:
        chain.append(hf.SequenceBiasLogitsProcessor({(i,): bias for i, bias in params.logit_bias}))
    if params.repetition_penalty != 1.0:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.bad_words:
        chain.append(hf.NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if params.min_tokens:
        chain.append(hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, list(EOS)))
    scores = chain(torch.tensor([text]), scores[None])[0]
    for token in set(text[len(PROMPT) :]):
        scores[token] -= params.presence_penalty + params.frequency_penalty * text[len(PROMPT) :].count(token)
    warpers = hf.LogitsProcessorList([hf.TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(hf.MinPLogitsWarper(params.min_p))
    return warpers(torch.tensor([text]), scores[None])[0]


class Plain:
    """Plain decoding of a toy target under a request's settings."""

    def __init__(self, target: Toy, params: SamplingParams):
        self.target, self.params = target, params
        self._known: dict[Text, Tensor] = {}

    def law(self, answer: Text) -> Tensor:
        if answer not in self._known:
            text = (*PROMPT, *answer)
            self._known[answer] = reference(self.params, text, self.target.logits(text)).softmax(-1)
        return self._known[answer]

    def texts(self, length: int, answer: Text = (), weight: float = 1.0) -> Iterator[tuple[Text, float]]:
        """All continuations of an answer to this length, with their probability."""
        if len(answer) == length:
            yield answer, weight
            return
        for token, share in enumerate(self.law(answer).tolist()):
            if share > 0:
                yield from self.texts(length, (*answer, token), weight * share)

    def error(self, outcomes: Iterable[tuple[DraftTree, Verification, float]], length: int) -> float:
        """Largest difference of any text's probability between rounds that end so and plain decoding.

        What a round leaves undecided is continued plainly to the same length. Infinite where a weight is not a number.
        """
        found: dict[Text, float] = defaultdict(float)
        try:
            for tree, end, weight in outcomes:
                emitted = (*paths(tree)[end.path[-1]], end.next_token)
                for text, share in self.texts(length, emitted, weight):
                    found[text] += share
        except ArithmeticError:
            return float("inf")
        plain = dict(self.texts(length))
        return max(abs(found[text] - plain.get(text, 0.0)) for text in plain.keys() | found.keys())


# ---- chance


class Script:
    """A Chance that replays decisions and then takes the first possible one; weight is the outcome's probability."""

    def __init__(self, decisions: list):
        self.decisions, self.taken, self.options, self.weight = decisions, [], [], 1.0

    def accept(self, probability: float) -> bool:
        return self._take([(True, probability), (False, 1.0 - probability)])

    def draw(self, weights: Tensor) -> int:
        return self._take(list(enumerate((weights / weights.sum()).tolist())))

    def _take(self, options: list):
        if not all(0.0 <= weight <= 1.0 + 1e-12 for _, weight in options):  # also catches NaN
            raise ArithmeticError(f"not probabilities: {options}")
        possible = {value: weight for value, weight in options if weight > 0.0}
        at = len(self.taken)
        value = self.decisions[at] if at < len(self.decisions) else next(iter(possible))
        self.taken.append(value)
        self.options.append(possible)
        self.weight *= possible[value]
        return value


def every_outcome(run: Callable[[Script], Verification]) -> Iterator[tuple[Verification, float]]:
    """Runs a rule once per possible sequence of coins and draws."""
    waiting: list[list] = [[]]
    while waiting:
        start = waiting.pop()
        chance = Script(start)
        result = run(chance)
        yield result, chance.weight
        for at in range(len(start), len(chance.taken)):
            waiting += [[*chance.taken[:at], other] for other in chance.options[at] if other != chance.taken[at]]


Rule = Callable[[DraftTree, Script], Verification]


def deciding(target: Toy, params: SamplingParams) -> Rule:
    """rules.decide on raw logits with the request's processors, its Chance replaced."""
    processors = Processors.build(params, len(PROMPT), EOS)

    def rule(tree: DraftTree, chance: Script) -> Verification:
        logits = node_logits(target, tree)
        with mock.patch.object(rules, "Chance", lambda seed, position: chance):
            return rules.decide(tree, logits, params, None, ROOT, processors, PROMPT)

    return rule


def ends(trees: Iterable[tuple[DraftTree, float]], rule: Rule) -> Iterator[tuple[DraftTree, Verification, float]]:
    """Every outcome of a rule on every tree."""
    for tree, weight in trees:
        for end, share in every_outcome(lambda chance, tree=tree: rule(tree, chance)):
            yield tree, end, weight * share


def by_law(rule, target: Toy):
    """A rule of (tree, law, chance) at temperature 1 without processors."""

    def run(tree, chance) -> Verification:
        laws = node_logits(target, tree).softmax(-1)
        return rule(tree, lambda node: laws[node], chance)

    return run


def rejection_error(trees, target: Toy, length: int, rule=None, params: SamplingParams | None = None) -> float:
    """How far texts of this length are from plain decoding, over every tree, coin and draw."""
    params = params or SamplingParams(temperature=1.0, verification="rejection")
    return Plain(target, params).error(ends(trees, rule or deciding(target, params)), length)


# ---- drawn trees


Edit = Callable[[list[int], Tensor], list[int]]


def drawn(
    drafter: Toy, counts: tuple[int, ...], edit: Edit | None = None, iid: bool = False
) -> Iterator[tuple[DraftTree, float]]:
    """Every tree of a fixed shape (children per node by depth) drawn from the drafter, with its probability.

    Children are drawn without replacement and numbered in that order. Faults a rule must be sensitive to: edit changes
    the list after drawing, iid draws with replacement and keeps repeats, which DraftTree itself refuses.
    """

    def grow(tokens: list[int], parents: list[int], depths: list[int], laws: list[Tensor], weight: float):
        node = len(laws)  # the next node whose children are to be drawn: breadth first
        if node == len(tokens):
            yield _tree(tokens, parents, depths, laws, check=not iid), weight
            return
        q = drafter.law((*PROMPT, *_above(tokens, parents, node)))
        if depths[node] == len(counts):
            yield from grow(tokens, parents, depths, [*laws, q], weight)
            return
        for children, share in _draws(q, counts[depths[node]], iid):
            kept = edit(children, q) if edit else children
            more = [depths[node] + 1] * len(kept)
            yield from grow(tokens + kept, parents + [node] * len(kept), depths + more, [*laws, q], weight * share)

    yield from grow([PROMPT[-1]], [-1], [0], [], 1.0)


def _draws(q: Tensor, count: int, iid: bool) -> Iterator[tuple[list[int], float]]:
    for tokens in itertools.product(range(len(q)), repeat=count):
        weight, left = 1.0, 1.0
        for token in tokens:
            weight *= float(q[token]) / left
            left -= 0.0 if iid else float(q[token])
        if weight > 0 and (iid or len(set(tokens)) == count):
            yield list(tokens), weight


def _above(tokens: list[int], parents: list[int], node: int) -> list[int]:
    path: list[int] = []
    while node:
        path.insert(0, tokens[node])
        node = parents[node]
    return path


def _tree(tokens: list[int], parents: list[int], depths: list[int], laws: list[Tensor], check: bool) -> DraftTree:
    fields = {"tokens": tuple(tokens), "parents": tuple(parents), "depths": tuple(depths)}
    if check:
        return DraftTree(**fields, draft_probs=torch.stack(laws))
    tree = object.__new__(DraftTree)
    for name, value in (fields | {"draft_probs": torch.stack(laws)}).items():
        object.__setattr__(tree, name, value)
    return tree


# ---- noise: the simplex cut into cells of equal choices


Point = tuple[float, float, float]


def _clip(polygon: list[Point], normal: Point) -> list[Point]:
    """The part of a convex polygon where the point times the normal is not negative."""
    out: list[Point] = []
    for a, b in zip(polygon, polygon[1:] + polygon[:1]):
        side_a, side_b = (sum(x * n for x, n in zip(point, normal)) for point in (a, b))
        if side_a >= 0:
            out.append(a)
        if side_a * side_b < 0:
            t = side_a / (side_a - side_b)
            out.append(tuple(x + t * (y - x) for x, y in zip(a, b)))
    return out


def _area(polygon: list[Point]) -> float:
    """Share of the simplex that the polygon covers."""
    (x0, y0, _), total = polygon[0], 0.0
    for (x1, y1, _), (x2, y2, _) in zip(polygon[1:], polygon[2:]):
        total += (x1 - x0) * (y2 - y0) - (x2 - x0) * (y1 - y0)
    return abs(total)


def cells(laws: list[Tensor]) -> list[tuple[Tensor, float]]:
    """Noise vectors [3], one from each set of Gumbel noises under which all laws make the same choices, and its weight.

    Gumbel noise is -log of exponentials E, and argmax(log p + g) = argmin(E / p) depends on the direction of E alone,
    which is uniform on the simplex: the sets are polygons there and their areas are exact.
    """
    polygons: list[list[Point]] = [[(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]]
    for law in laws:
        p = law.tolist()
        pieces = []
        for polygon in polygons:
            for best in range(3):
                piece = polygon
                for other in {0, 1, 2} - {best}:  # E[best] / p[best] <= E[other] / p[other]
                    normal = [0.0, 0.0, 0.0]
                    normal[best], normal[other] = -p[other], p[best]
                    piece = _clip(piece, tuple(normal)) if piece else []
                if len(piece) > 2 and _area(piece) > 1e-15:
                    pieces.append(piece)
        polygons = pieces
    found = []
    for polygon in polygons:
        middle = [sum(point[i] for point in polygon) / len(polygon) for i in range(3)]
        found.append((-torch.tensor(middle, dtype=torch.float64).log(), _area(polygon)))
    return found


class Table:
    """A Noise with given values by position."""

    def __init__(self, rows: dict[int, Tensor]):
        self.rows = rows

    def at(self, position: int) -> Tensor:
        return self.rows[position]


def every_noise(tree: DraftTree, plain: Plain) -> Iterator[tuple[Table, float]]:
    """All noises that lead to different choices anywhere in a tree over three tokens, with their weight."""
    levels = range(max(tree.depths) + 1)
    laws = [plain.law(path) for path in paths(tree)]
    by_level = [cells([law for law, depth in zip(laws, tree.depths) if depth == level]) for level in levels]
    for picks in itertools.product(*by_level):
        weight = 1.0
        for _, share in picks:
            weight *= share
        yield Table({ROOT + 1 + level: noise for level, (noise, _) in enumerate(picks)}), weight
