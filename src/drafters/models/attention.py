"""Attention of training-time test: a causal block per document plus one diagonal entry per later step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

QUERY_BLOCK = 256


@dataclass(frozen=True)
class Segment:
    """One document: its query rows [q_start, q_end) and its keys [k_start, k_end) in the packed order."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int


def _blocks(segments: list[Segment]) -> list[tuple[slice, int, int]]:
    """Cut long documents into query blocks so that no score matrix outgrows QUERY_BLOCK rows."""
    return [
        (slice(start, min(start + QUERY_BLOCK, segment.q_end)), segment.k_start, segment.k_end)
        for segment in segments
        for start in range(segment.q_start, segment.q_end, QUERY_BLOCK)
    ]


def _grouped(x: Tensor, rows: slice, kv_heads: int) -> Tensor:
    """View rows of [nq, S, d] as [nkv, nq/nkv, s, d], the heads that share a key side by side."""
    x = x[:, rows]
    return x.reshape(kv_heads, -1, *x.shape[1:])


def _scores(q: Tensor, keys: Tensor, reach: Tensor, first: int, scale: float) -> Tensor:
    """Masked scores [nkv, g, s, L] of q [nkv, g, s, d] against keys [nkv, L, d] from packed key `first` on."""
    heads, group, rows, size = q.shape
    scores = torch.bmm(q.reshape(heads, group * rows, size), keys.transpose(1, 2)).mul_(scale)
    scores = scores.view(heads, group, rows, -1)
    hidden = torch.arange(first, first + keys.shape[1], device=q.device) > reach[:, None]
    return scores.masked_fill_(hidden, float("-inf"))


def _apply(weights: Tensor, values: Tensor) -> Tensor:
    """Multiply weights [nkv, g, s, L] with values [nkv, L, d] into [nkv, g, s, d]."""
    heads, group, rows, length = weights.shape
    return torch.bmm(weights.reshape(heads, group * rows, length), values).view(heads, group, rows, -1)


class _BlockDiagonal(torch.autograd.Function):
    """Softmax over block and diagonal scores together; keeps O(T) and recomputes the scores backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        segments: list[Segment],
        reach: Tensor,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        *diagonals: Tensor,
    ) -> Tensor:
        kind = torch.promote_types(q.dtype, torch.float32)
        scale = q.shape[-1] ** -0.5
        heads, half = keys.shape[0], len(diagonals) // 2
        out = torch.empty(q.shape, dtype=kind, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=kind, device=q.device)
        for rows, first, last in _blocks(segments):
            block_q = _grouped(q, rows, heads).to(kind)
            scores = _scores(block_q, keys[:, first:last].to(kind), reach[rows], first, scale)
            singles = [(block_q * k[:, None, rows].to(kind)).sum(-1) * scale for k in diagonals[:half]]
            total = torch.logsumexp(scores, dim=-1)
            for single in singles:
                total = torch.logaddexp(total, single)
            mixed = _apply(scores.sub_(total[..., None]).exp_(), values[:, first:last].to(kind))
            for single, v in zip(singles, diagonals[half:], strict=True):
                mixed += (single - total).exp_()[..., None] * v[:, None, rows].to(kind)
            out[:, rows] = mixed.flatten(0, 1)
            lse[:, rows] = total.flatten(0, 1)
        ctx.segments, ctx.scale = segments, scale
        ctx.save_for_backward(reach, q, keys, values, out, lse, *diagonals)
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        reach, q, keys, values, out, lse, *diagonals = ctx.saved_tensors
        kind, scale, heads, half = out.dtype, ctx.scale, keys.shape[0], len(diagonals) // 2
        grad_q = torch.zeros(q.shape, dtype=kind, device=q.device)
        grad_keys, grad_values = (torch.zeros(x.shape, dtype=kind, device=q.device) for x in (keys, values))
        grad_diagonals = [torch.zeros(x.shape, dtype=kind, device=q.device) for x in diagonals]
        for rows, first, last in _blocks(ctx.segments):
            block_q, grad = (_grouped(x, rows, heads).to(kind) for x in (q, grad_out))
            total = _grouped(lse, rows, heads)
            delta = (grad * _grouped(out, rows, heads)).sum(-1)
            k, v = keys[:, first:last].to(kind), values[:, first:last].to(kind)
            weights = _scores(block_q, k, reach[rows], first, scale).sub_(total[..., None]).exp_()
            flat_weights, flat_grad = weights.flatten(1, 2), grad.flatten(1, 2)
            grad_values[:, first:last] += torch.bmm(flat_weights.transpose(1, 2), flat_grad)
            inner = _apply(grad, v.transpose(1, 2)).sub_(delta[..., None]).mul_(weights).mul_(scale)
            block_grad_q = _apply(inner, k)
            grad_keys[:, first:last] += torch.bmm(inner.flatten(1, 2).transpose(1, 2), block_q.flatten(1, 2))
            for index in range(half):
                k_one, v_one = (diagonals[i][:, None, rows].to(kind) for i in (index, half + index))
                weight = ((block_q * k_one).sum(-1) * scale - total).exp_()
                slope = weight * ((grad * v_one).sum(-1) - delta) * scale
                block_grad_q += slope[..., None] * k_one
                grad_diagonals[index][:, rows] = (slope[..., None] * block_q).sum(1)
                grad_diagonals[half + index][:, rows] = (weight[..., None] * grad).sum(1)
            grad_q[:, rows] = block_grad_q.flatten(0, 1)
        grads = [grad_q.to(q.dtype), grad_keys.to(keys.dtype), grad_values.to(values.dtype)]
        return None, None, *grads, *[g.to(x.dtype) for g, x in zip(grad_diagonals, diagonals, strict=True)]


def block_diagonal_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    diagonal: list[tuple[Tensor, Tensor]],
    segments: list[Segment],
    reach: Tensor,
) -> Tensor:
    """Attend q [nq, S, d] to its document's keys, values [nkv, A, d] and to one own entry per earlier step.

    reach int64 [S] is the packed index of the last key a query may see; diagonal holds (key, value) pairs
    [nkv, S, d], row i visible to query i only. One softmax spans both. Returns [nq, S, d]; memory O(S + A).
    Queries outside every segment are an error of the caller: their rows would be undefined.
    """
    flat = [k for k, _ in diagonal] + [v for _, v in diagonal]
    return _BlockDiagonal.apply(segments, reach, q, keys, values, *flat)
