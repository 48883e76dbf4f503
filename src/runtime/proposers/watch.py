"""Another proposer as it is, with what each round emitted written down."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from runtime.proposers.base import Budget, Held, Proposer
from runtime.tree import DraftTree


class Watched(Proposer):
    """rounds: by prompt ids, how many tokens each round emitted, in order."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.name, self.taps, self.wants_logits = inner.name, inner.taps, inner.wants_logits
        self.trained_depth = inner.trained_depth
        self.rounds: dict[tuple[int, ...], list[int]] = {}
        self._rows: dict[int, list[int]] = {}

    def models(self) -> tuple[nn.Module, ...]:
        return self.inner.models()

    def reserve(self, num_rows: int, num_slots: int) -> None:
        self.inner.reserve(num_rows, num_slots)

    def start(self, row: int, prompt: list[int], token: int, taps: Tensor | None) -> None:
        self._rows[row] = self.rounds[tuple(prompt)] = []
        self.inner.start(row, prompt, token, taps)

    def propose(self, budgets: dict[int, Budget]) -> dict[int, DraftTree]:
        return self.inner.propose(budgets)

    def commit(self, row: int, tokens: list[int], taps: Tensor | None) -> None:
        self._rows[row].append(len(tokens))
        self.inner.commit(row, tokens, taps)

    def observe(self, row: int, tree: DraftTree, logits: Tensor) -> None:
        self.inner.observe(row, tree, logits)

    def audit(self, row: int, ids: list[int], taps: Tensor | None) -> Iterable[Held]:
        return self.inner.audit(row, ids, taps)

    def release(self, row: int) -> None:
        del self._rows[row]
        self.inner.release(row)
