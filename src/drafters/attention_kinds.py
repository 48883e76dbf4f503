"""Which tokens each kind of a target's layers sees, and the masks that say so."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from drafters.errors import TargetError

Windows = dict[str, int | None]
Masks = dict[str, Tensor | None]


def attention_windows(config: PreTrainedConfig, name: str) -> Windows:
    """Layer types of target `name` and how many positions each sees (None: all); raises TargetError for other kinds.

    A rejected draft must leave no trace, so each kind has to keep states per token: keys and values.
    """
    kinds, settings = get_layer_types_and_kwargs(config)
    windows: Windows = {}
    for layer, (kind, setting) in enumerate(zip(kinds, settings)):
        if kind not in ("full_attention", "sliding_attention"):
            raise TargetError(_refusal(name, kind, layer))
        window = setting.get("sliding_window")
        if windows.setdefault(kind, window) != window:
            raise TargetError(
                f"target {name!r}: layer {layer} has a sliding window of {window}, layers before it "
                f"{windows[kind]}; one window per target is supported. Set target.path to another target."
            )
    if getattr(config, "use_bidirectional_attention", None):  # only some families have the setting
        raise TargetError(
            f"target {name!r} sets use_bidirectional_attention=true: its tokens look ahead, so no token can "
            "be decoded before the next. Set target.path to a causal target."
        )
    return windows


def _refusal(name: str, kind: str, layer: int) -> str:
    sequential = kind in ("linear_attention", "conv", "hybrid", "hybrid_sliding")
    why = (
        "Such a layer folds all tokens into one running state: siblings of a tree would need a state each, and a "
        "rejected draft cannot be taken out again, of a chain either, because the cache keeps no earlier states"
        if sequential
        else "The cache can take a rejected draft back from full_attention and sliding_attention only"
    )
    return (
        f"target {name!r}: layer {layer} is of kind {kind!r}, supported are full_attention and sliding_attention. "
        f"{why}. Decode it with transformers' own generate, or set target.path to another target."
    )


def within(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """bool [B, N, W]: keys less than `window` positions before the query, from positions [B, N] and [B, W].

    By position, never by slot: siblings share one, and a row's slots carry no order.
    """
    return queries[..., None] - keys[:, None] < window


def text_masks(windows: Windows, mask: Tensor | None, positions: Tensor) -> Masks:
    """The mask of each layer type over whole texts, bool [B, 1, T, T] or None where it is plainly causal.

    mask: bool [B, 1, T, T], True where a query may look, or None for one causal text a row; positions: [B, T].
    """
    length = positions.shape[-1]
    hides = {kind: window is not None and window < length for kind, window in windows.items()}
    causal = mask
    if mask is None and any(hides.values()):
        causal = torch.ones(length, length, dtype=torch.bool, device=positions.device).tril()
    return {
        kind: causal & within(positions, positions, windows[kind])[:, None] if hidden else mask
        for kind, hidden in hides.items()
    }


def as_given(masks: Masks) -> Tensor | Masks | None:
    """Masks as a decoder takes them: one alone where it has one kind of layer, else all by kind."""
    return masks if len(masks) > 1 else next(iter(masks.values()))
