"""An adversary: random ids, claimed as certain; with it text must not change and speed must hold."""

from __future__ import annotations

import random

from torch import Tensor

from runtime.proposers.base import Budget, Proposer
from runtime.tree import DraftTree


class RandomProposer(Proposer):
    """Trees of random shape and random ids from a seed that take the whole budget; every score claims certainty."""

    name = "random"

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self._random = random.Random(seed)
        self._root: dict[int, int] = {}

    def start(self, row: int, prompt: list[int], token: int, taps: Tensor | None) -> None:
        self._root[row] = token

    def propose(self, budgets: dict[int, Budget]) -> dict[int, DraftTree]:
        return {row: self._tree(self._root[row], budget) for row, budget in budgets.items()}

    def commit(self, row: int, tokens: list[int], taps: Tensor | None) -> None:
        self._root[row] = tokens[-1]

    def release(self, row: int) -> None:
        del self._root[row]

    def _tree(self, root: int, budget: Budget) -> DraftTree:
        if not budget.depth:
            return DraftTree.root(root)
        # All different, so no node has a child twice.
        tokens = self._random.sample(range(self.vocab_size), min(budget.nodes - 1, self.vocab_size))
        parents, depths, inner = [-1], [0], [0]
        for node in range(1, len(tokens) + 1):
            parent = self._random.choice(inner)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            if depths[node] < budget.depth:
                inner.append(node)
        sources = ("", *[self.name] * len(tokens))
        return DraftTree((root, *tokens), tuple(parents), tuple(depths), (0.0,) * (len(tokens) + 1), sources)
