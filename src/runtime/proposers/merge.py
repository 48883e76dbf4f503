"""Several proposers in one tree: the union of theirs, the likeliest nodes kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from runtime.calibration import Calibration
from runtime.proposers.base import Budget, Held, Proposer
from runtime.tree import DraftTree


@dataclass
class _Union:
    """The trie of several trees; node 0 is the root, parents come before children."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    raws: list[float] = field(default_factory=lambda: [0.0])  # log of the proposer's own conditional probability
    chances: list[float] = field(default_factory=lambda: [1.0])  # the same, calibrated
    sources: list[str] = field(default_factory=lambda: [""])
    _index: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, tree: DraftTree, calibration: Calibration, sampled: bool) -> None:
        """Adds a tree's nodes; one that is there already becomes that of the proposer with the better chance."""
        place = [0] * len(tree)
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            raw = min(0.0, tree.scores[node] - tree.scores[parent])  # fp32 sums may round above the parent
            chance = calibration.probability(tree.sources[node], tree.depths[node], math.exp(raw), sampled)
            key = place[parent], tree.tokens[node]
            found = place[node] = self._index.setdefault(key, len(self.tokens))
            if found == len(self.tokens):
                self.tokens.append(tree.tokens[node])
                self.parents.append(place[parent])
                self.depths.append(tree.depths[node])
                self.raws.append(raw)
                self.chances.append(chance)
                self.sources.append(tree.sources[node])
            elif chance > self.chances[found]:
                self.raws[found], self.chances[found], self.sources[found] = raw, chance, tree.sources[node]

    def tree(self) -> DraftTree:
        """All nodes; scores are the sums of each node's own proposer's, as calibration takes them."""
        scores = [0.0]
        for parent, raw in zip(self.parents[1:], self.raws[1:]):
            scores.append(scores[parent] + raw)
        return DraftTree(
            tuple(self.tokens), tuple(self.parents), tuple(self.depths), tuple(scores), tuple(self.sources)
        )


class MergeProposer(Proposer):
    """One tree per row from several proposers, ranked by how often each one's drafts have been accepted.

    A node several propose keeps the best calibrated probability and its proposer as source. All share the engine's
    Calibration, which must be updated with every verified tree. On a row that is verified by rejection the members
    propose without drawing: a mixture of draws and candidates has no known distribution.
    """

    def __init__(self, members: Sequence[Proposer], calibration: Calibration) -> None:
        self.members = tuple(members)
        self.calibration = calibration
        self.name = "+".join(member.name for member in members)
        self.weights = sum(member.weights for member in members)
        self.taps = tuple(sorted({tap for member in members for tap in member.taps}))
        self.wants_logits = any(member.wants_logits for member in members)
        self.asks = any(member.asks for member in members)

    def models(self) -> tuple[nn.Module, ...]:
        return tuple(model for member in self.members for model in member.models())

    def reserve(self, num_rows: int, num_slots: int) -> None:
        for member in self.members:
            member.reserve(num_rows, num_slots)

    def start(self, row: int, prompt: list[int], token: int, taps: Tensor | None) -> None:
        for member in self.members:
            member.start(row, prompt, token, self._own(member, taps))

    def propose(self, budgets: dict[int, Budget]) -> dict[int, DraftTree]:
        asked = {row: replace(b, noise=None, drawn=False) if b.drawn else b for row, b in budgets.items()}
        drafts = [member.propose(_reachable(asked, member.trained_depth)) for member in self.members]
        return {row: self._merge([trees[row] for trees in drafts], budget) for row, budget in budgets.items()}

    def observe(self, row: int, tree: DraftTree, logits: Tensor) -> None:
        for member in self.members:
            if member.wants_logits:
                member.observe(row, tree, logits)

    def commit(self, row: int, tokens: list[int], taps: Tensor | None) -> None:
        for member in self.members:
            member.commit(row, tokens, self._own(member, taps))

    def audit(self, row: int, ids: list[int], taps: Tensor | None) -> Iterator[Held]:
        for member in self.members:
            for name, held, truth in member.audit(row, ids, self._own(member, taps)):
                yield f"{member.name}: {name}", held, truth

    def release(self, row: int) -> None:
        for member in self.members:
            member.release(row)

    def _own(self, member: Proposer, taps: Tensor | None) -> Tensor | None:
        """The columns [T, k*Ht] a member asked for."""
        if not member.taps or taps is None:
            return None
        if member.taps == self.taps:
            return taps
        columns = [self.taps.index(tap) for tap in member.taps]
        return taps.unflatten(-1, (len(self.taps), -1))[:, columns].flatten(1)

    def _merge(self, trees: list[DraftTree], budget: Budget) -> DraftTree:
        sampled = budget.noise is not None or budget.drawn
        union = _Union([trees[0].tokens[0]])
        for tree, member in zip(trees, self.members):
            if len(tree) > 1 and not (tree.scores and tree.sources):
                raise ValueError(f"proposer {member.name!r} gives no scores or sources; it cannot be merged")
            union.add(tree, self.calibration, sampled)
        whole = union.tree()
        if len(whole) <= budget.nodes:
            return whole
        paths = self.calibration.path_probabilities(whole, sampled)
        # A child is never above its parent and comes later, so with a stable sort no node is kept without its parent.
        kept = sorted(sorted(range(len(whole)), key=lambda node: -paths[node])[: budget.nodes])
        return whole.part(kept)


def _reachable(budgets: dict[int, Budget], trained_depth: int | None) -> dict[int, Budget]:
    """Budgets no deeper than a member was trained for: what it would draft below costs time and is hardly accepted."""
    if trained_depth is None:
        return budgets
    return {row: replace(budget, depth=min(budget.depth, trained_depth)) for row, budget in budgets.items()}
