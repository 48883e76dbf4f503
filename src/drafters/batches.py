"""Packed rows in an order that depends on (seed, epoch, index) only, cut into optimiser steps and ranks."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.config import TrainerConfig
from drafters.corpus import ResponseRecord
from drafters.errors import DataError

log = logging.getLogger(__name__)

OPEN_ROWS = (
    32  # rows being filled at once: enough to keep filler under 10%, few enough to stay linear in records
)
FILLER = -1  # document id of filler positions


@dataclass(frozen=True)
class Batch:
    """One block of packed rows; position t of every tensor speaks about the same token.

    ids int64 [B, T]; position_ids int64 [B, T] restarting at 0 per document; document_ids int64 [B, T]
    counting from 0 in each row, -1 on filler; loss_mask bool [B, T], true at response tokens;
    record_ids[b][d] names the record that is document d of row b.
    """

    ids: Tensor
    position_ids: Tensor
    document_ids: Tensor
    loss_mask: Tensor
    record_ids: tuple[tuple[str, ...], ...]


def mask4d(document_ids: Tensor) -> Tensor:
    """Return the mask bool [B, 1, T, T] of document_ids [B, T]: causal, same document, filler sees itself.

    Filler attends to itself because a softmax over nothing is NaN and NaN times a zero loss weight is still
    NaN.
    """
    length = document_ids.shape[-1]
    same = document_ids[:, :, None] == document_ids[:, None, :]
    real = (document_ids != FILLER)[:, :, None]
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=document_ids.device)
    return ((same & real & causal) | itself)[:, None]


@dataclass(frozen=True)
class Fit:
    """How records fit a row length: usable record indices, and the ids cut short or left out."""

    usable: tuple[int, ...]
    truncated: tuple[str, ...]
    dropped: tuple[str, ...]


def fit(records: Sequence[ResponseRecord], row_length: int) -> Fit:
    """Sort records by how they fit `row_length` tokens: whole, response cut short, or no response token left.

    Raises DataError when nothing is left to train on or an id occurs twice.
    """
    usable, truncated, dropped = [], [], []
    seen: set[str] = set()
    for index, record in enumerate(records):
        if record.id in seen:
            raise DataError(
                f"record id {record.id!r} occurs twice. Collect into an empty folder, or rename one."
            )
        seen.add(record.id)
        prompt, response = len(record.prompt_ids), len(record.response_ids)
        if response == 0 or prompt >= row_length:
            dropped.append(record.id)
            continue
        usable.append(index)
        if prompt + response > row_length:
            truncated.append(record.id)
    if not usable:
        raise DataError(
            f"none of {len(records)} records has a response token within trainer.row_length={row_length}. "
            "Set trainer.row_length higher, or collect again with a smaller data.max_prompt_tokens."
        )
    return Fit(tuple(usable), tuple(truncated), tuple(dropped))


def _shuffled(records: Sequence[ResponseRecord], usable: Sequence[int], seed: int, epoch: int) -> list[int]:
    """Order records by a hash of (seed, epoch, id): no generator state to save, equal on every platform."""

    def key(index: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{epoch}/{records[index].id}".encode(), digest_size=16).digest()

    return sorted(usable, key=key)


def pack(
    records: Sequence[ResponseRecord],
    row_length: int,
    seed: int,
    epoch: int,
    usable: Sequence[int] | None = None,
) -> list[tuple[int, ...]]:
    """Return the rows of one epoch as tuples of record indices: shuffled, then first fit over the open rows.

    A pure function of its arguments; every usable record is in exactly one row. `usable` defaults to
    fit().usable.
    """
    usable = fit(records, row_length).usable if usable is None else usable
    closed: list[tuple[int, ...]] = []
    rows: list[list[int]] = []
    room: list[int] = []
    for index in _shuffled(records, usable, seed, epoch):
        size = min(len(records[index].prompt_ids) + len(records[index].response_ids), row_length)
        slot = next((slot for slot, free in enumerate(room) if free >= size), None)
        if slot is None:
            if len(rows) == OPEN_ROWS:
                fullest = room.index(min(room))
                closed.append(tuple(rows.pop(fullest)))
                room.pop(fullest)
            rows.append([])
            room.append(row_length)
            slot = len(rows) - 1
        rows[slot].append(index)
        room[slot] -= size
    return closed + [tuple(row) for row in rows]


def collate(records: Sequence[ResponseRecord], rows: Sequence[tuple[int, ...]], row_length: int) -> Batch:
    """Lay rows of record indices out as one Batch, T = row_length; a record longer than that loses its tail.

    An empty row is all filler: it keeps ranks in step and adds nothing to the loss.
    """
    shape = (len(rows), row_length)
    ids = torch.zeros(shape, dtype=torch.int64)
    positions = torch.zeros(shape, dtype=torch.int64)
    documents = torch.full(shape, FILLER, dtype=torch.int64)
    supervised = torch.zeros(shape, dtype=torch.bool)
    for b, row in enumerate(rows):
        start = 0
        for document, index in enumerate(row):
            record = records[index]
            tokens = (record.prompt_ids + record.response_ids)[:row_length]
            end = start + len(tokens)
            ids[b, start:end] = torch.tensor(tokens, dtype=torch.int64)
            positions[b, start:end] = torch.arange(len(tokens))
            documents[b, start:end] = document
            supervised[b, start + len(record.prompt_ids) : end] = True
            start = end
    names = tuple(tuple(records[index].id for index in row) for row in rows)
    return Batch(ids, positions, documents, supervised, names)


class Batches:
    """Optimiser steps over packed records, addressed by index: resuming needs the step number, nothing else.

    A step is a fixed number of rows, `rows_per_step` = tokens_per_step / mean supervised tokens per row of
    epoch 0 (rounded, at least 1), because packing decides how many supervised tokens a row holds. Rows of
    epoch 0, 1, 2, ... follow one another without a gap; a step may straddle two epochs. The rows of a step do
    not depend on the number of ranks: rank r takes rows r, r + world_size, ... and an all-filler row where
    its share is short.
    """

    def __init__(
        self,
        records: Sequence[ResponseRecord],
        cfg: TrainerConfig,
        rank: int = 0,
        world_size: int = 1,
        rows_per_batch: int = 1,
    ) -> None:
        """Measure epoch 0; raises DataError when no record has a response token within cfg.row_length."""
        self.records, self.row_length, self.seed = records, cfg.row_length, cfg.seed
        self.rank, self.world_size, self.rows_per_batch = rank, world_size, rows_per_batch
        self.fit = fit(records, cfg.row_length)
        self._epochs: dict[int, list[tuple[int, ...]]] = {}
        self._starts = [0]
        self.rows_per_epoch = len(self._epoch(0))
        self.supervised_tokens = sum(self._supervised(i) for i in self.fit.usable)
        self.rows_per_step = max(1, round(cfg.tokens_per_step * self.rows_per_epoch / self.supervised_tokens))
        if self.fit.truncated or self.fit.dropped:
            log.warning(
                "row_length=%d: %d of %d records cut short, %d left out (no response token fits)",
                self.row_length,
                len(self.fit.truncated),
                len(records),
                len(self.fit.dropped),
            )

    def steps(self, epochs: float) -> int:
        """Return the number of steps that cover `epochs` passes over the records, rounded up; 0 for none."""
        whole, part = int(epochs), epochs - int(epochs)
        rows = self._start_of(whole) + (math.ceil(part * len(self._epoch(whole))) if part else 0)
        return max(1, math.ceil(rows / self.rows_per_step)) if epochs else 0

    def seen(self, steps: int) -> int:
        """Return the supervised tokens of the first `steps` optimiser steps, all ranks; one seen twice counts twice."""
        return sum(self._supervised(i) for step in range(steps) for row in self.rows(step) for i in row)

    def rows(self, index: int) -> list[tuple[int, ...]]:
        """Return all rows (tuples of record indices) of optimiser step `index`, those of every rank."""
        first = index * self.rows_per_step
        return [self._row(first + offset) for offset in range(self.rows_per_step)]

    def step(self, index: int) -> list[Batch]:
        """Return this rank's batches of step `index`, each of rows_per_batch rows; as many on every rank."""
        mine = self.rows(index)[self.rank :: self.world_size]
        batches = math.ceil(math.ceil(self.rows_per_step / self.world_size) / self.rows_per_batch)
        share = batches * self.rows_per_batch
        mine += [()] * (share - len(mine))
        return [
            collate(self.records, mine[start : start + self.rows_per_batch], self.row_length)
            for start in range(0, share, self.rows_per_batch)
        ]

    def epoch_of(self, index: int) -> int:
        """Return the epoch in which optimiser step `index` begins."""
        return self._locate(index * self.rows_per_step)[0]

    def _supervised(self, record: int) -> int:
        found = self.records[record]
        return min(len(found.response_ids), self.row_length - len(found.prompt_ids))

    def _epoch(self, epoch: int) -> list[tuple[int, ...]]:
        if epoch not in self._epochs:
            # Two epochs are enough for a step that straddles the border; older ones can be packed again.
            for old in [seen for seen in self._epochs if seen < epoch - 1]:
                del self._epochs[old]
            self._epochs[epoch] = pack(self.records, self.row_length, self.seed, epoch, self.fit.usable)
        return self._epochs[epoch]

    def _start_of(self, epoch: int) -> int:
        while len(self._starts) <= epoch:
            self._starts.append(self._starts[-1] + len(self._epoch(len(self._starts) - 1)))
        return self._starts[epoch]

    def _locate(self, row: int) -> tuple[int, int]:
        epoch = 0
        while self._start_of(epoch + 1) <= row:
            epoch += 1
        return epoch, row - self._starts[epoch]

    def _row(self, row: int) -> tuple[int, ...]:
        epoch, offset = self._locate(row)
        return self._epoch(epoch)[offset]
