"""How draft trees grow: which continuations rank first, and the shapes of trees drawn for the rejection rule."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.proposers.base import Budget

# Coupled drafting ranks by log_softmax((log q + g) / s): sums of log q + g themselves do not penalise depth, as the
# largest of the noise has a positive mean. Flat between 1 and 2.
NOISE_SCALE = 1.5
# Chances by rank that shape a drawn tree; any numbers are lossless as long as they do not depend on the draws.
RANK_CHANCE, RANK_DECAY = 0.55, 0.4


def draft_log_probs(logits: Tensor, budgets: Sequence[Budget]) -> Tensor:
    """log q [B, n, V] of draft logits at each row's temperature (1 for greedy rows: q is then the ranking alone)."""
    if all(budget.noise is None for budget in budgets):
        return torch.log_softmax(logits.float(), -1)
    heat = torch.tensor([1.0 if b.noise is None else b.noise.temperature for b in budgets], device=logits.device)
    return torch.log_softmax(logits.float() / heat[:, None, None], -1)


def noise_at(budgets: Sequence[Budget], depth: int, target_ids: Tensor) -> Tensor:
    """The target's noise fp32 [B, 1, Vd] for tokens at a depth, 0 in greedy rows and below a row's depth.

    target_ids: int64 [Vd], what each draft id means to the target.
    """
    rows = torch.zeros(len(budgets), 1, len(target_ids), device=target_ids.device)
    for b, budget in enumerate(budgets):
        if budget.noise is not None and depth <= budget.depth:
            rows[b, 0] = budget.noise.at(depth).to(target_ids.device)[target_ids].float()
    return rows


def rank(log_probs: Tensor, budgets: Sequence[Budget], depth: int, target_ids: Tensor) -> Tensor:
    """Log scores [B, n, Vd] of continuations at a depth: log q, or its coupled form in rows that sample.

    A token wins in the target when log p + g is largest, so a drafter that knows g ranks by log q + g.
    """
    if all(budget.noise is None for budget in budgets):
        return log_probs
    noisy = log_probs + noise_at(budgets, depth, target_ids)
    scale = torch.tensor([1.0 if b.noise is None else NOISE_SCALE for b in budgets], device=log_probs.device)
    return torch.log_softmax(noisy / scale[:, None, None], -1)


def fixed_shape(nodes: int, depth: int, top_k: int) -> list[list[int]]:
    """Children counts of a tree of `nodes` nodes, level by level: shape[l][i] is the count of the i-th node at depth l.

    Depends on the budget alone, as the rejection rule asks: pruning by what was drawn would not be lossless.
    """
    taken: list[tuple[int, ...]] = []  # a node is its path of ranks
    heap = [(-RANK_CHANCE, (0,))]
    while heap and len(taken) < nodes - 1:
        chance, path = heapq.heappop(heap)
        taken.append(path)
        if len(path) < depth:
            heapq.heappush(heap, (chance * RANK_CHANCE, (*path, 0)))
        if path[-1] + 1 < top_k:
            heapq.heappush(heap, (chance * RANK_DECAY, (*path[:-1], path[-1] + 1)))
    levels: list[list[tuple[int, ...]]] = [[()]]
    while levels[-1]:
        levels.append(sorted(path for path in taken if len(path) == len(levels)))
    pairs = zip(levels, levels[1:-1])
    return [[sum(child[:-1] == path for child in below) for path in level] for level, below in pairs]
