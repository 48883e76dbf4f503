"""Masked grouped attention, registered with transformers under the name `outrider`, and the masks it takes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.utils import TransformersKwargs

NAME = "outrider"
# What models hand every attention function beside the tensors: the mask tells it already, or it is not about attention.
TOLD = {"cache", "use_cache", *TransformersKwargs.__annotations__}


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention with fewer key than query heads, without copying keys; returns [B, Hq, N, Dv].

    q: [B, Hq, N, D]; k, v: [B, Hkv, L, D]. The heads that share a key head are laid along the query axis, so keys
    and values are read once. mask [B, 1, N, L]: bool, True where a query may look, or additive in q's dtype; it
    may come repeated for the G heads of a group, [B, 1, G*N, L]. None: query i sees keys 0..i, N = L.
    """
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    out = F.scaled_dot_product_attention(_pack(q, k), k, v, attn_mask=_tile(mask, q, k), scale=scale)
    return out.reshape(*q.shape[:3], v.shape[-1])


def explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention step by step, for what no fused kernel does; shapes as in grouped_attention.

    softcap: scores become softcap * tanh(score / softcap) (Gemma 2). sinks [Hq]: one more score per head that takes
    its share of the softmax and gives nothing (gpt-oss).
    """
    nodes = q.shape[2]
    if mask is None:
        mask = torch.ones(nodes, nodes, dtype=torch.bool, device=q.device).tril()[None, None]
    scores = (_pack(q, k) @ k.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    tiled = _tile(mask, q, k)
    scores = scores.masked_fill(~tiled, float("-inf")) if tiled.dtype == torch.bool else scores + tiled
    if sinks is not None:
        column = sinks.float().reshape(1, k.shape[1], -1, 1).expand(len(q), -1, -1, nodes)
        scores = torch.cat([scores, column.reshape(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype)
    return (weights @ v).reshape(*q.shape[:3], v.shape[-1])


def _pack(q: Tensor, k: Tensor) -> Tensor:
    batch, heads, nodes, size = q.shape
    return q.reshape(batch, k.shape[1], heads // k.shape[1] * nodes, size)


def _tile(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    nodes, groups = q.shape[2], q.shape[1] // k.shape[1]
    if mask.dtype not in (torch.bool, q.dtype):
        mask = mask.to(q.dtype)
    return mask if mask.shape[2] in (1, nodes * groups) else mask.repeat(1, 1, groups, 1)


def ancestors_of(parents: Tensor, depth: int) -> Tensor:
    """bool [B, N, N]: row i of tree b is True at node i and at each node above it.

    parents: [B, N], the root's is itself; padding nodes are their own parents. depth: that of the deepest node.
    """
    batch, nodes = parents.shape
    table = torch.eye(nodes, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    above = parents
    for _ in range(depth):
        table.scatter_(2, above[..., None], True)
        above = parents.gather(1, above)
    return table


def tree_mask(seen: Tensor, slots: Tensor, ancestors: Tensor, near: Tensor | None = None) -> Tensor:
    """bool [B, N, W]: each node sees its row's committed slots, its ancestors and itself.

    seen: bool [B, W], committed slots; slots: [B, N], W or more for padding nodes; ancestors: bool [B, N, N].
    near: bool [B, N, W], what a sliding window leaves of it. Padding nodes see slot 0: no softmax is empty.
    """
    batch, width = seen.shape
    nodes = slots.shape[1]
    allowed = torch.zeros(batch, nodes, width + 1, dtype=torch.bool, device=seen.device)
    allowed[..., :width] = seen[:, None]
    where = slots.clamp(max=width)  # one column more takes what padding nodes write
    allowed.scatter_(2, where[:, None].expand(batch, nodes, nodes), ancestors)
    allowed = allowed[..., :width]
    if near is not None:
        allowed &= near
    allowed[..., 0] |= where == width
    return allowed


def additive(allowed: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[B, 1, G*N, W] of 0 and -inf for bool [B, N, W]: made once here, not once per layer."""
    mask = 1 - allowed.to(dtype).reciprocal()  # 1 - 1/1 and 1 - 1/0: filling by a mask is 20 times slower on a CPU
    return mask[:, None].repeat(1, 1, groups, 1)


def _for_transformers(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    unknown = sorted(name for name, value in others.items() if value is not None and name not in TOLD)
    if unknown:
        raise ValueError(f"{type(module).__name__} asks attention for {unknown[0]}, which the outrider attention lacks")
    nodes = query.shape[2]
    if attention_mask is None and (nodes != key.shape[2] or nodes > (sliding_window or nodes)):
        raise ValueError("the outrider attention needs the 4-D mask the engine builds")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is None and s_aux is None:
        out = grouped_attention(query, key, value, attention_mask, scale)
    else:
        out = explicit_attention(query, key, value, attention_mask, scale, softcap, s_aux)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _for_transformers)
