"""Keys and values of a drafter's one attention layer, for all rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from drafters.models.layers import Attend, AttentionLayer
from runtime.attention import grouped_attention


class DraftCache:
    """Committed entries live at slot = position, drafted ones behind them; the next round overwrites those, so keys
    made from drafted features never survive a round."""

    def __init__(self, layer: AttentionLayer, dtype: torch.dtype, device: torch.device, rows: int, slots: int) -> None:
        attention = layer.self_attn
        self.device, self.slots, self.scale = device, slots, attention.head_dim**-0.5
        # One slot more than is read takes the padding entries of shorter rows.
        size = (rows, attention.num_kv_heads, slots + 1, attention.head_dim)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)

    def entries(self, lengths: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Where so many entries per row go behind the committed ones: slots, positions and what they see.

        Slots and positions are [B, N], visible is bool [B, 1, N, W]; entries beyond a row's count are padding.
        """
        longest, width = max(counts), max(map(sum, zip(lengths, counts)))
        slots = torch.full((len(counts), longest), self.slots)
        visible = torch.zeros(len(counts), 1, longest, width, dtype=torch.bool)
        for b, (length, count) in enumerate(zip(lengths, counts)):
            slots[b, :count] = torch.arange(length, length + count)
            visible[b, 0, :count] = torch.ones(count, width, dtype=torch.bool).tril(length)
            visible[b, 0, count:, 0] = True
        return slots, slots.clamp(max=self.slots - 1), visible

    def attend(self, rows: list[int], slots: Tensor, visible: Tensor) -> Attend:
        """An attention that writes its keys and values at slots [B, N] of the rows and sees what `visible` says."""
        table = torch.tensor(rows, device=self.device)
        where, mask = slots.to(self.device), visible.to(self.device)
        width = visible.shape[-1]
        whole = rows == list(range(rows[0], rows[0] + len(rows)))
        pick = slice(rows[0], rows[0] + len(rows)) if whole else table  # a slice reads without copying

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[table[:, None], :, where] = k.transpose(1, 2)
            self.values[table[:, None], :, where] = v.transpose(1, 2)
            return grouped_attention(q, self.keys[pick, :, :width], self.values[pick, :, :width], mask, self.scale)

        return attend


def padded(features: Sequence[Sequence[Tensor]]) -> Tensor:
    """Each row's pieces [n, D] joined, zeros behind the shorter rows: [B, N, D]."""
    joined = [torch.cat(list(pieces)) for pieces in features]
    longest = max(map(len, joined))
    return torch.stack([functional.pad(row, (0, 0, 0, longest - len(row))) for row in joined])
