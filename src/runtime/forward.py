"""The target's forward over slots."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafters.attention_kinds import Masks, as_given, within
from drafters.target import Target
from runtime.attention import NAME, additive, ancestors_of, tree_mask
from runtime.kv_cache import SlotCache
from runtime.packing import prepare
from runtime.tree import DraftTree

CHUNK = 512  # prompt tokens per forward once a window hides part of the prompt and masks have to be made


@dataclass(frozen=True)
class Round:
    """What one run() was asked and what it looked at; kept for debug mode, which checks it.

    slots: those taken, per row; masks: bool [B, N, W] per layer type; hidden [B, N, Ht]; taps [B, N, K*Ht].
    """

    first: int
    trees: list[DraftTree | None]
    starts: list[int]
    slots: list[list[int]]
    masks: dict[str, Tensor]
    hidden: Tensor
    taps: Tensor | None


class TargetRunner:
    """Runs trees of several rows through the target in one forward."""

    def __init__(self, target: Target, num_rows: int, num_slots: int, taps: tuple[int, ...], debug: bool = False):
        """taps: hidden_states indices to return. debug: keep what each run() looked at in `last`, for debug mode."""
        self.windows = target.windows
        self.target = target
        self.taps = taps
        self.debug = debug
        self.last: Round | None = None
        self.model = target.model
        self.model.set_attn_implementation(NAME)
        prepare(self.model)
        config = target.text_config
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.cache = SlotCache(config.num_hidden_layers, num_rows, num_slots)

    @torch.inference_mode()
    def run(
        self, first: int, trees: list[DraftTree | None], starts: list[int]
    ) -> tuple[Tensor, Tensor | None, list[list[int]]]:
        """Final hidden states [B, N, Ht], taps [B, N, K*Ht] and the slots taken, for rows first..first+B.

        trees[b]: the nodes to run (None: the row idles); starts[b]: absolute position of its root.
        """
        cache, device = self.cache, self.target.device
        slots = [cache.take(first + b, len(tree)) if tree else [] for b, tree in enumerate(trees)]
        inputs, depth = _lay_out(trees, slots, starts, cache.trash)
        cache.place(first, inputs[3], inputs[2])
        ids, parents, positions, table = torch.from_numpy(inputs).to(device)
        width = cache.open(first, first + len(trees), table)
        allowed = self._tree_masks(first, table, parents, positions, width, depth)
        masks = {kind: additive(mask, self.groups, self.model.dtype) for kind, mask in allowed.items()}
        hidden, taps = self._forward(ids, positions, masks)
        if self.debug:
            self.last = Round(first, trees, starts, slots, allowed, hidden, taps)
        return hidden, taps, slots

    @torch.inference_mode()
    def prefill(self, row: int, ids: list[int]) -> tuple[Tensor, Tensor | None]:
        """Commits a prompt to an empty row; hidden states [1, T, Ht] and taps [1, T, K*Ht]."""
        cache = self.cache
        if cache.free(row) != cache.num_slots:
            raise RuntimeError(f"row {row} holds {cache.length(row)} tokens; release it before the next prompt")
        slots = np.array([cache.take(row, len(ids))])  # an empty row gives slot = position
        cache.place(row, slots, slots)
        hides = any(window is not None and len(ids) > window for window in self.windows.values())
        size = CHUNK if hides else len(ids)
        parts = [self._prefill(row, ids, start, min(start + size, len(ids))) for start in range(0, len(ids), size)]
        cache.commit(row, slots[0].tolist(), slots[0].tolist())
        hidden, taps = zip(*parts)
        return torch.cat(hidden, 1), torch.cat(taps, 1) if self.taps else None

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [..., V]."""
        return self.target.logits(hidden)

    def _prefill(self, row: int, ids: list[int], start: int, end: int) -> tuple[Tensor, Tensor | None]:
        positions = torch.arange(start, end, device=self.target.device)[None]
        self.cache.open(row, row + 1, positions, read=end)
        keys = torch.arange(end, device=self.target.device)[None]
        causal = positions[..., None] >= keys[:, None]
        masks: Masks = {}
        for kind, window in self.windows.items():
            if start == 0 and (window is None or end <= window):
                masks[kind] = None  # plainly causal: the kernel needs no mask
            else:
                allowed = causal if window is None else causal & within(positions, keys, window)
                masks[kind] = additive(allowed, self.groups, self.model.dtype)
        return self._forward(torch.tensor([ids[start:end]], device=self.target.device), positions, masks)

    def _tree_masks(
        self, first: int, slots: Tensor, parents: Tensor, positions: Tensor, width: int, depth: int
    ) -> dict[str, Tensor]:
        """bool [B, N, W] per layer type, what each node sees."""
        cache, part = self.cache, slice(first, first + len(slots))
        seen = cache.committed[part, :width].to(slots.device)
        above = ancestors_of(parents, depth)
        masks = {}
        for kind, window in self.windows.items():
            near = None
            if window is not None:
                near = within(positions, cache.positions[part, :width].to(slots.device), window)
            masks[kind] = tree_mask(seen, slots, above, near)
        return masks

    def _forward(self, ids: Tensor, positions: Tensor, masks: Masks) -> tuple[Tensor, Tensor | None]:
        out = self.target.backbone(
            input_ids=ids,
            position_ids=positions,
            attention_mask=as_given(masks),
            cache=self.cache,
            use_cache=True,
            output_hidden_states=list(self.taps) if self.taps else False,
        )
        taps = torch.cat([out.hidden_states[i] for i in self.taps], -1) if self.taps else None
        return out.last_hidden_state, taps


def _lay_out(
    trees: list[DraftTree | None], slots: list[list[int]], starts: list[int], trash: int
) -> tuple[np.ndarray, int]:
    """Token ids, parents, absolute positions and slots as one array [4, B, N], and the deepest node's depth.

    Rows are padded with nodes of their own: token 0, their own parents, at the root's position, in the trash slot.
    """
    nodes = max(len(tree) for tree in trees if tree)
    zeros, own, spare = (0,) * nodes, tuple(range(nodes)), (trash,) * nodes
    rows: tuple[list, list, list, list] = ([], [], [], [])
    for tree, taken in zip(trees, slots):
        size = len(tree) if tree else 0
        rows[0].append((*tree.tokens, *zeros[size:]) if tree else zeros)
        rows[1].append((0, *tree.parents[1:], *own[size:]) if tree else own)
        rows[2].append((*tree.depths, *zeros[size:]) if tree else zeros)
        rows[3].append((*taken, *spare[size:]))
    laid = np.fromiter(itertools.chain.from_iterable(itertools.chain(*rows)), np.int64, 4 * len(trees) * nodes)
    laid = laid.reshape(4, len(trees), nodes)
    depth = int(laid[2].max())
    laid[2] += np.array(starts)[:, None]
    return laid, depth
