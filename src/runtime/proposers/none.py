"""No drafts: the same engine, one token per forward."""

from __future__ import annotations

from torch import Tensor

from runtime.proposers.base import Budget, Proposer
from runtime.tree import DraftTree


class NoneProposer(Proposer):
    """Plain decoding as a tree with a root and nothing else."""

    name = "none"

    def __init__(self) -> None:
        self._token: dict[int, int] = {}

    def start(self, row: int, prompt: list[int], token: int, taps: Tensor | None) -> None:
        self._token[row] = token

    def propose(self, budgets: dict[int, Budget]) -> dict[int, DraftTree]:
        return {row: DraftTree.root(self._token[row]) for row in budgets}

    def commit(self, row: int, tokens: list[int], taps: Tensor | None) -> None:
        self._token[row] = tokens[-1]

    def release(self, row: int) -> None:
        del self._token[row]
