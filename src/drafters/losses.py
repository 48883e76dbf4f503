"""Losses as sums over supervised positions, fused with their gradient and chunked over positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

CHUNK_ELEMENTS = 1 << 22


def _chunks(rows: int, width: int) -> list[slice]:
    """Cut `rows` so that one chunk of [rows, width] holds about CHUNK_ELEMENTS numbers."""
    size = max(1, CHUNK_ELEMENTS // width)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


@dataclass(frozen=True)
class Teacher:
    """What the target says at R positions: probabilities [R, Vd] within the draft vocabulary, and its choice.

    choice int64 [R] is the draft id of the target's argmax over the full vocabulary, -1 outside the draft's.
    """

    probabilities: Tensor
    choice: Tensor


def make_teacher(last_hidden: Tensor, head: Tensor, argmax: Tensor, to_draft: Tensor) -> Teacher:
    """Build the teacher of last_hidden [R, Ht] from the target head's draft rows [Vd, Ht].

    argmax int64 [R] is the target's choice in the full vocabulary; to_draft int64 [V] maps it, -1 outside.
    """
    rows = last_hidden.to(head.dtype)
    probabilities = torch.empty(
        len(rows), len(head), dtype=torch.promote_types(head.dtype, torch.float32), device=head.device
    )
    for part in _chunks(*probabilities.shape):
        logits = functional.linear(rows[part], head).to(probabilities.dtype)
        torch.softmax(logits, dim=-1, out=probabilities[part])
    return Teacher(probabilities, to_draft[argmax])


class _SoftCrossEntropy(torch.autograd.Function):
    """Computes the gradient while the logits of a chunk are at hand, so that [N, Vd] never exists."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, probabilities: Tensor, index: Tensor
    ) -> tuple[Tensor, Tensor]:
        kind = torch.promote_types(hidden.dtype, torch.float32)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=kind, device=weight.device) if needs_weight else None
        predicted = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        total = torch.zeros((), dtype=kind, device=hidden.device)
        for part in _chunks(len(hidden), len(weight)):
            logits = functional.linear(hidden[part], weight).to(kind)
            wanted = probabilities[index[part]]
            predicted[part] = logits.argmax(-1)
            lse = torch.logsumexp(logits, dim=-1, keepdim=True)
            total += lse.sum() - torch.dot(wanted.view(-1), logits.view(-1))
            if needs_hidden or needs_weight:
                slope = logits.sub_(lse).exp_().sub_(wanted).to(weight.dtype)
            if needs_hidden:
                torch.mm(slope, weight, out=grad_hidden[part])
            if needs_weight:
                grad_weight += slope.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(predicted)
        return total, predicted

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scaled_hidden = None if grad_hidden is None else grad_hidden * grad_total.to(grad_hidden.dtype)
        scaled_weight = None if grad_weight is None else (grad_weight * grad_total).to(ctx.weight_dtype)
        return scaled_hidden, scaled_weight, None, None


def soft_cross_entropy(
    hidden: Tensor, weight: Tensor, probabilities: Tensor, index: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum over N positions of -sum_v p_v log q_v, q = softmax(hidden @ weight.T), p = probabilities[index].

    hidden [N, H], weight [Vd, H], probabilities fp32 [R, Vd] with rows that sum to 1, index int64 [N].
    Returns the fp32 sum and the argmax of q, int64 [N].
    """
    return _SoftCrossEntropy.apply(hidden, weight, probabilities, index)
