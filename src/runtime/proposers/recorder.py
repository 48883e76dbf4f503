"""Plain decoding that keeps the target's hidden states, so that training need not compute them again."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.proposers.none import NoneProposer


class Recorder(NoneProposer):
    """Drafts nothing; keeps each finished row's taps until take() asks for them."""

    name = "recorder"

    def __init__(self, taps: tuple[int, ...]) -> None:
        """taps: HF hidden_states indices to keep."""
        super().__init__()
        self.taps = taps
        self._ids: dict[int, list[int]] = {}
        self._taps: dict[int, list[Tensor]] = {}
        self._finished: dict[tuple[int, ...], Tensor] = {}

    def start(self, row: int, prompt: list[int], token: int, taps: Tensor | None) -> None:
        super().start(row, prompt, token, taps)
        self._ids[row], self._taps[row] = [*prompt, token], [taps]

    def commit(self, row: int, tokens: list[int], taps: Tensor | None) -> None:
        super().commit(row, tokens, taps)
        self._ids[row] += tokens
        self._taps[row].append(taps.clone())  # a row's slice would keep the whole batch's tensor alive

    def release(self, row: int) -> None:
        super().release(row)
        self._finished[tuple(self._ids.pop(row))] = torch.cat(self._taps.pop(row))

    def take(self, ids: list[int]) -> Tensor | None:
        """The taps [T - 1, K*Ht] of a finished row with these T ids, all tokens but its last.

        None for an answer of one token: it ended with the prompt's own forward, before the row began.
        """
        return self._finished.pop(tuple(ids), None)
