"""Token recycling: the target's own runners-up, kept per token, are the next drafts."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from runtime.proposers.base import Budget, Proposer
from runtime.proposers.lookup import best_first
from runtime.tree import DraftTree

KEPT = 8  # continuations kept per token
UNSEEN = -1
LEAST = 1e-6  # chances below are no drafts
BLOCK = 64  # ids whose largest logit is looked at first


class RecycleProposer(Proposer):
    """A tree over what the target last thought of after each token (Token Recycling, arXiv 2408.08696).

    A table [V, 8] of each token's last seen best continuations and their logits, shared by all rows: what any request
    taught serves the next. Chances are the softmax of the eight, at the row's temperature where it samples.
    """

    name = "recycle"
    wants_logits = True

    def __init__(self, vocab_size: int) -> None:
        self.kept = min(KEPT, vocab_size)
        self._next = np.full((vocab_size, self.kept), UNSEEN, dtype=np.int32)
        self._logits = np.zeros((vocab_size, self.kept), dtype=np.float32)
        self._root: dict[int, int] = {}

    def start(self, row: int, prompt: list[int], token: int, taps: Tensor | None) -> None:
        self._root[row] = token

    def propose(self, budgets: dict[int, Budget]) -> dict[int, DraftTree]:
        return {row: self._tree(self._root[row], budget) for row, budget in budgets.items()}

    def observe(self, row: int, tree: DraftTree, logits: Tensor) -> None:
        """Keeps the best continuations after every node; of equal tokens the later node's stay."""
        values, ids = top_logits(logits, self.kept)
        tokens = list(tree.tokens)
        self._next[tokens] = ids.cpu().numpy()
        self._logits[tokens] = values.float().cpu().numpy()

    def commit(self, row: int, tokens: list[int], taps: Tensor | None) -> None:
        self._root[row] = tokens[-1]

    def release(self, row: int) -> None:
        del self._root[row]

    def _tree(self, root: int, budget: Budget) -> DraftTree:
        temperature = 1.0 if budget.noise is None else budget.noise.temperature
        return best_first(root, root, partial(self._continuations, temperature), budget, self.name)

    def _continuations(self, temperature: float, token: int) -> list[tuple[int, float, int]]:
        ids = self._next[token].tolist()
        if ids[0] == UNSEEN:
            return []
        logits = self._logits[token].tolist()
        weights = [math.exp((logit - logits[0]) / temperature) for logit in logits]
        scale = 1.0 / sum(weights)
        return [(after, scale * w, after) for after, w in zip(ids, weights) if scale * w > LEAST]


def top_logits(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest `count` of each row of [N, V], best first: values and ids [N, count].

    They lie in the blocks with the largest maxima, so only those are sorted: several times faster than topk over V.
    """
    rows, blocks = len(logits), logits.shape[-1] // BLOCK
    if blocks <= count:
        return logits.topk(count, dim=-1)
    whole = blocks * BLOCK
    best = logits[:, :whole].unflatten(1, (blocks, BLOCK)).amax(-1).topk(count, dim=-1).indices
    inside = torch.arange(BLOCK, device=logits.device)
    rest = torch.arange(whole, logits.shape[-1], device=logits.device).expand(rows, -1)
    ids = torch.cat([(best[..., None] * BLOCK + inside).flatten(1), rest], 1)
    values, order = logits.gather(1, ids).topk(count, dim=-1)
    return values, ids.gather(1, order)
