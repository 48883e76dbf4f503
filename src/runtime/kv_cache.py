"""Keys and values in slots: tree nodes take free slots, accepting a path re-points them, nothing is copied."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

STEP = 64  # widths read are rounded up to multiples of this, and to an eighth of their size


@dataclass
class _Window:
    """Where the running forward writes and what it reads: shared by all layers of one cache."""

    rows: Tensor  # [B, 1] physical rows
    slots: Tensor  # [B, N] slot of each node
    first: int
    last: int
    width: int  # slots read, counted from 0


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, [R, Hkv, S + 1, D], made by the first update; the extra slot takes padding."""

    is_compileable = False
    is_sliding = False  # a sliding layer keeps all its keys too: what leaves the window is hidden by the mask

    def __init__(self, num_rows: int, num_slots: int):
        super().__init__()
        self.num_rows, self.num_slots = num_rows, num_slots
        self.window: _Window | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates storage for states of this kind: heads, sizes, dtype and device are the layer's own."""
        self.keys, self.values = (
            states.new_zeros(self.num_rows, states.shape[1], self.num_slots + 1, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes [B, Hkv, N, D] at the window's slots; returns views of all slots the window reads."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
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
        return self.num_slots


class SlotCache(Cache):
    """Ragged rows over fixed storage; each row knows which slots hold committed tokens, and at which position.

    Slots carry no order: masks are built from the two tables, which live on the host: committed, bool
    [R, S + 1], and positions, int [R, S + 1] (meaningful where a slot is taken or committed).
    """

    def __init__(self, num_layers: int, num_rows: int, num_slots: int):
        super().__init__(layers=[SlotLayer(num_rows, num_slots) for _ in range(num_layers)])
        self.num_rows = num_rows
        self.num_slots = num_slots
        # numpy, for its cheap small writes; the tensors below share the memory
        self._committed = np.zeros((num_rows, num_slots + 1), dtype=bool)
        self._positions = np.zeros((num_rows, num_slots + 1), dtype=np.int64)
        self.committed = torch.from_numpy(self._committed)
        self.positions = torch.from_numpy(self._positions)
        # Free slots of a row: those given back (sorted, at most a tree's worth) and all from `_high` on.
        self._returned: list[list[int]] = [[] for _ in range(num_rows)]
        self._high = [0] * num_rows

    @property
    def trash(self) -> int:
        """The slot padding nodes write to; never read."""
        return self.num_slots

    def length(self, row: int) -> int:
        """Committed tokens of a row."""
        return int(np.count_nonzero(self._committed[row]))

    def free(self, row: int) -> int:
        """Slots of a row neither committed nor taken."""
        return len(self._returned[row]) + self.num_slots - self._high[row]

    def take(self, row: int, count: int) -> list[int]:
        """The lowest free slots of a row; raises RuntimeError when the row is full."""
        if count > self.free(row):
            raise RuntimeError(f"row {row} needs {count} slots and has {self.free(row)} of {self.num_slots} free")
        returned, high = self._returned[row], self._high[row]
        slots = returned[:count]
        fresh = count - len(slots)
        self._returned[row] = returned[count:]
        self._high[row] = high + fresh
        return slots + list(range(high, high + fresh))

    def place(self, first: int, slots: np.ndarray, positions: np.ndarray) -> None:
        """Notes the absolute positions [B, N] of the nodes in slots [B, N] of rows first..first+B."""
        self._positions[np.arange(first, first + len(slots))[:, None], slots] = positions

    def commit(self, row: int, taken: list[int], kept: list[int]) -> None:
        """Makes `kept` part of the row's text and gives the rest of `taken` back."""
        self._committed[row, kept] = True
        if len(kept) < len(taken):
            held = set(kept)
            self._returned[row] = sorted(self._returned[row] + [slot for slot in taken if slot not in held])

    def release(self, row: int) -> None:
        """Forgets a row."""
        self._committed[row] = False
        self._returned[row] = []
        self._high[row] = 0

    def open(self, first: int, last: int, slots: Tensor, read: int | None = None) -> int:
        """Sets what the next forward writes (slots [B, N], on the layers' device) and reads for rows first..last.

        Returns the width read, slots counted from 0: `read`, or else up to the highest in use, rounded up so that
        widths, and the shapes compiled for them, stay few.
        """
        width = read or bucket(max(self._high[first:last], default=1), self.num_slots)
        rows = torch.arange(first, last, device=slots.device)[:, None]
        window = _Window(rows, slots, first, last, width)
        for layer in self.layers:
            layer.window = window
        return width


def bucket(used: int, most: int) -> int:
    """The width read for `used` slots, at most `most`: never above used by more than STEP or an eighth."""
    step = max(STEP, 1 << max(used.bit_length() - 4, 0))
    return min(-(-max(used, 1) // step) * step, most)
