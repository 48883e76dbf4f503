"""Prompt lookup: what followed the last few tokens the last time they appeared."""

from __future__ import annotations

from torch import Tensor

from runtime.proposers.base import Budget, Proposer
from runtime.tree import DraftTree

LONGEST = 3


class NgramProposer(Proposer):
    """Proposes, as a chain, the continuation of the most recent match of the longest suffix of up to 3 tokens."""

    name = "ngram"

    def __init__(self) -> None:
        self._ids: dict[int, list[int]] = {}
        # For each row, where each n-gram was last followed by something: n-gram -> index of what followed.
        self._seen: dict[int, dict[tuple[int, ...], int]] = {}

    def start(self, row: int, prompt: list[int], token: int, taps: Tensor | None) -> None:
        self._ids[row] = []
        self._seen[row] = {}
        self._extend(row, [*prompt, token])

    def propose(self, budgets: dict[int, Budget]) -> dict[int, DraftTree]:
        return {row: self._chain(row, budget) for row, budget in budgets.items()}

    def commit(self, row: int, tokens: list[int], taps: Tensor | None) -> None:
        self._extend(row, tokens)

    def release(self, row: int) -> None:
        del self._ids[row], self._seen[row]

    def _extend(self, row: int, tokens: list[int]) -> None:
        ids, seen = self._ids[row], self._seen[row]
        for token in tokens:
            for size in range(1, min(LONGEST, len(ids)) + 1):
                seen[tuple(ids[-size:])] = len(ids)
            ids.append(token)

    def _chain(self, row: int, budget: Budget) -> DraftTree:
        ids, seen = self._ids[row], self._seen[row]
        for size in range(min(LONGEST, len(ids)), 0, -1):
            start = seen.get(tuple(ids[-size:]))
            if start is not None:
                count = min(budget.depth, budget.nodes - 1)
                return DraftTree.chain(ids[-1], ids[start : start + count])
        return DraftTree.root(ids[-1])
