"""The target's forward over slots."""

from __future__ import annotations

import torch
from torch import Tensor

from drafters.errors import TargetError
from drafters.target import Target
from runtime.attention import NAME
from runtime.kv_cache import SlotCache
from runtime.packing import pack_linears
from runtime.tree import DraftTree

class TargetRunner:
    """Runs trees of several rows through the target in one forward."""

    def __init__(self, target: Target, num_rows: int, num_slots: int, taps: tuple[int, ...]):
        kinds = set(getattr(target.text_config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise TargetError(
                f"target {target.name!r} has attention kinds {sorted(kinds)}; trees run on full attention only."
            )
        self.target = target
        self.taps = taps
        self.model = target.model
        self.model.set_attn_implementation(NAME)
        pack_linears(self.model)
        config = target.text_config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache = SlotCache(
            config.num_hidden_layers,
            num_rows,
            num_slots,
            config.num_key_value_heads,
            head_dim,
            target.dtype,
            target.device,
        )

    @torch.inference_mode()
    def run(
        self, first: int, trees: list[DraftTree | None], starts: list[int]
    ) -> tuple[Tensor, Tensor | None, list[list[int]]]:
        """Final hidden states [B, N, Ht], taps [B, N, K*Ht] and the slots taken, for rows first..first+B.

        trees[b]: the nodes to run (None: the row idles); starts[b]: absolute position of its root.
        """
        cache = self.cache
        last = first + len(trees)
        nodes = max(len(tree) for tree in trees if tree is not None)
        slots = [cache.take(first + b, len(tree)) if tree else [] for b, tree in enumerate(trees)]
        ids = torch.zeros(len(trees), nodes, dtype=torch.long)
        positions = torch.zeros(len(trees), nodes, dtype=torch.long)
        table = torch.full((len(trees), nodes), cache.trash, dtype=torch.long)
        for b, tree in enumerate(trees):
            if tree is None:
                continue
            ids[b, : len(tree)] = torch.tensor(tree.tokens)
            positions[b, : len(tree)] = torch.tensor(tree.depths) + starts[b]
            table[b, : len(tree)] = torch.tensor(slots[b])
        width = cache.open(first, last, table.to(self.target.device))
        known = [tree.ancestors() if tree else torch.zeros(0, 0, dtype=torch.bool) for tree in trees]
        return (*self._forward(ids, positions, cache.mask(first, last, slots, known, width)), slots)

    @torch.inference_mode()
    def prefill(self, row: int, ids: list[int]) -> tuple[Tensor, Tensor | None]:
        """Commits a prompt to an empty row; hidden states [1, T, Ht] and taps [1, T, K*Ht]."""
        cache = self.cache
        slots = cache.take(row, len(ids))
        width = cache.open(row, row + 1, torch.tensor([slots], device=self.target.device))
        causal = torch.ones(len(ids), width, dtype=torch.bool, device=self.target.device).tril()[None, None]
        out = self._forward(torch.tensor([ids]), torch.arange(len(ids))[None], causal)
        cache.commit(row, slots, slots)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [..., V]."""
        return self.target.logits(hidden)

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        device = self.target.device
        out = self.target.backbone(
            input_ids=ids.to(device),
            position_ids=positions.to(device),
            attention_mask=mask,
            cache=self.cache,
            use_cache=True,
            output_hidden_states=list(self.taps) if self.taps else False,
        )
        taps = torch.cat([out.hidden_states[i] for i in self.taps], -1) if self.taps else None
        return out.last_hidden_state, taps
