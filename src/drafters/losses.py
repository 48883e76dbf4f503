"""Losses as sums over supervised positions, fused with their gradient and chunked over positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from drafters.config_drafter import Objective
from drafters.objectives import RULES

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


class _Distillation(torch.autograd.Function):
    """Computes the gradient while the logits of a chunk are at hand, so that [N, Vd] never exists."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, probabilities: Tensor, index: Tensor, objective: Objective
    ) -> tuple[Tensor, Tensor]:
        rule = RULES[objective.name]
        kind = torch.promote_types(hidden.dtype, torch.float32)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=kind, device=weight.device) if needs_weight else None
        predicted = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        total = torch.zeros((), dtype=kind, device=hidden.device)
        for part in _chunks(len(hidden), len(weight)):
            logits = functional.linear(hidden[part], weight).to(kind)
            predicted[part] = logits.argmax(-1)
            part_total, slope = rule(logits, probabilities[index[part]], objective)
            total += part_total
            slope = slope.to(weight.dtype)
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
        return scaled_hidden, scaled_weight, None, None, None


def distillation_loss(
    hidden: Tensor, weight: Tensor, probabilities: Tensor, index: Tensor, objective: Objective
) -> tuple[Tensor, Tensor]:
    """Sum over N positions of the objective between q = softmax(hidden @ weight.T) and p = probabilities[index].

    hidden [N, H], weight [Vd, H], probabilities fp32 [R, Vd] with rows that sum to 1, index int64 [N].
    Returns the fp32 sum and the argmax of q, int64 [N].
    """
    return _Distillation.apply(hidden, weight, probabilities, index, objective)


class _SelfDistillation(torch.autograd.Function):
    """Computes the gradient while the logits of a chunk are at hand, so that [R, V] never exists."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, original: Tensor, head: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = torch.promote_types(hidden.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        choice = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        total = torch.zeros((), dtype=kind, device=hidden.device)
        agreed = torch.zeros((), dtype=torch.int64, device=hidden.device)
        for part in _chunks(len(hidden), len(head)):
            log_p = torch.log_softmax(functional.linear(original[part], head).to(kind), -1)
            log_q = torch.log_softmax(functional.linear(hidden[part], head).to(kind), -1)
            choice[part] = log_q.argmax(-1)
            agreed += (choice[part] == log_p.argmax(-1)).sum()
            p = log_p.exp()
            total += torch.dot(p.view(-1), (log_p - log_q).view(-1))
            if grad_hidden is not None:
                torch.mm(log_q.exp_().sub_(p).to(head.dtype), head, out=grad_hidden[part])
        ctx.save_for_backward(grad_hidden)
        ctx.mark_non_differentiable(choice, agreed)
        return total, choice, agreed

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (grad_hidden,) = ctx.saved_tensors
        return None if grad_hidden is None else grad_hidden * grad_total.to(grad_hidden.dtype), None, None


def self_distillation(hidden: Tensor, original: Tensor, head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum over R positions of KL(p || q), p = softmax(original @ head.T) and q = softmax(hidden @ head.T).

    hidden, original [R, Ht], head [V, Ht]; only `hidden` gets a gradient. Returns the fp32 sum, the argmax of q
    int64 [R], and at how many positions it is p's too.
    """
    return _SelfDistillation.apply(hidden, original, head)
