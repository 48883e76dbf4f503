"""Masked grouped attention, registered with transformers under the name `outrider`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

NAME = "outrider"


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention with fewer key than query heads, without copying keys; returns [B, Hq, N, D].

    q: [B, Hq, N, D]; k, v: [B, Hkv, L, D]; mask: bool [B, 1, N, L], True where a query may look. The heads that
    share a key head are laid along the query axis, so keys and values are read once.
    """
    batch, heads, nodes, width = q.shape
    groups = heads // k.shape[1]
    packed = q.reshape(batch, k.shape[1], groups * nodes, width)
    tiled = mask if nodes == 1 else mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(packed, k, v, attn_mask=tiled, scale=scale)
    return out.reshape(batch, heads, nodes, width)


def _for_transformers(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, None]:
    if attention_mask is None:
        raise ValueError("the outrider attention needs the 4-D mask the engine builds")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = grouped_attention(query, key, value, attention_mask, scale)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _for_transformers)
