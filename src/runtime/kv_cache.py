"""Keys and values in slots: tree nodes take free slots, accepting a path re-points them, nothing is copied."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass
class _Window:
    """Where the running forward writes and what it reads: shared by all layers of one cache."""

    rows: Tensor  # [B, 1] physical rows
    slots: Tensor  # [B, N] slot of each node
    first: int
    last: int
    width: int  # slots read, counted from 0


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, [R, Hkv, S + 1, D]; the extra slot takes padding nodes."""

    is_compileable = False
    is_sliding = False

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.is_initialized = True
        self.window: _Window | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise RuntimeError("slots are allocated when the cache is made")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes [B, Hkv, N, D] at the window's slots; returns views of all slots the window reads."""
        window = self.window
        self.keys[window.rows, :, window.slots] = key_states.transpose(1, 2)
        self.values[window.rows, :, window.slots] = value_states.transpose(1, 2)
        part = (slice(window.first, window.last), slice(None), slice(0, window.width))
        return self.keys[part], self.values[part]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.width, 0

    def get_seq_length(self) -> int:
        return 0  # positions are always given; the cache has no single length

    def get_max_length(self) -> int:
        return self.keys.shape[2] - 1


class SlotCache(Cache):
    """Ragged rows over fixed storage; each row knows which slots hold committed tokens.

    Slots carry no order: positions are in the rotated keys, and masks are built from the slot table.
    """

    def __init__(
        self,
        num_layers: int,
        num_rows: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        shape = (num_rows, num_kv_heads, num_slots + 1, head_dim)
        super().__init__(layers=[SlotLayer(shape, dtype, device) for _ in range(num_layers)])
        self.num_rows = num_rows
        self.num_slots = num_slots
        self.committed = torch.zeros(num_rows, num_slots + 1, dtype=torch.bool)
        self._free = [list(range(num_slots)) for _ in range(num_rows)]
        self._high = [0] * num_rows

    @property
    def trash(self) -> int:
        """The slot padding nodes write to; never read."""
        return self.num_slots

    def length(self, row: int) -> int:
        """Committed tokens of a row."""
        return int(self.committed[row].sum())

    def take(self, row: int, count: int) -> list[int]:
        """The lowest free slots of a row; raises RuntimeError when the row is full."""
        free = self._free[row]
        if count > len(free):
            raise RuntimeError(f"row {row} needs {count} slots and has {len(free)} of {self.num_slots} free")
        slots = [heapq.heappop(free) for _ in range(count)]
        self._high[row] = max(self._high[row], slots[-1] + 1)
        return slots

    def commit(self, row: int, taken: list[int], kept: list[int]) -> None:
        """Makes `kept` part of the row's text and gives the rest of `taken` back."""
        self.committed[row, kept] = True
        for slot in set(taken).difference(kept):
            heapq.heappush(self._free[row], slot)

    def release(self, row: int) -> None:
        """Forgets a row."""
        self.committed[row] = False
        self._free[row] = list(range(self.num_slots))
        self._high[row] = 0

    def open(self, first: int, last: int, slots: Tensor) -> int:
        """Sets what the next forward writes and reads for rows first..last; returns the width read."""
        width = max(self._high[first:last], default=1) or 1
        rows = torch.arange(first, last, device=slots.device)[:, None]
        window = _Window(rows, slots, first, last, width)
        for layer in self.layers:
            layer.window = window
        return width

    def mask(self, first: int, last: int, slots: list[list[int]], ancestors: list[Tensor], width: int) -> Tensor:
        """bool [B, 1, N, width]: each node sees its row's committed slots, its ancestors and itself.

        slots[b], ancestors[b]: the slots of row b's nodes and their [n, n] ancestor table; rows without nodes
        and padding nodes see slot 0, so that no softmax is empty.
        """
        nodes = max((len(row) for row in slots), default=1) or 1
        mask = self.committed[first:last, None, :width].repeat(1, nodes, 1)
        for b, row_slots in enumerate(slots):
            count = len(row_slots)
            if count:
                mask[b, :count, row_slots] = ancestors[b]
            mask[b, count:, 0] = True
        return mask[:, None].to(self.layers[0].keys.device)
