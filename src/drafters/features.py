"""The target's side of a batch: computed on the spot, or once per document and kept in a checksummed store."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafters.artifacts import atomic_write_json
from drafters.batches import Batch, mask4d
from drafters.errors import ArtifactError
from drafters.losses import make_teacher
from drafters.models.ttt import Features, Layout
from drafters.target import Target

log = logging.getLogger(__name__)

SHARD_BYTES = 64 << 20
LOGIT_ELEMENTS = 1 << 23
FORMAT_VERSION = 1


def target_choice(target: Target, last_hidden: Tensor) -> Tensor:
    """Return the target's argmax over its full vocabulary, int64 [R], of last_hidden [R, Ht]; in chunks of rows."""
    rows = max(1, LOGIT_ELEMENTS // target.vocab_size)
    parts = [target.logits(part).argmax(-1) for part in last_hidden.split(rows)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=last_hidden.device)


class FeatureSource(Protocol):
    """Turns a batch and its layout into Features on the training device."""

    def __call__(self, batch: Batch, layout: Layout) -> Features: ...

    def flush(self) -> None:
        """Put what is still in memory where a resumed run finds it."""


class _Teaching:
    """What both sources share: the target and the draft rows of its head."""

    def __init__(self, target: Target, taps: tuple[int, ...], t2d: Tensor, dtype: torch.dtype) -> None:
        self.target, self.taps = target, taps
        t2d = t2d.to(target.device)
        self.head = target.head_weight.detach()[t2d].to(dtype)
        self.to_draft = torch.where(t2d, t2d.cumsum(0) - 1, -1)

    def _features(self, taps: Tensor, last_hidden: Tensor, choice: Tensor) -> Features:
        device = self.target.device
        teacher = make_teacher(last_hidden.to(device), self.head, choice.to(device), self.to_draft)
        return Features(taps.to(device), teacher)


class OnlineFeatures(_Teaching):
    """Runs the target on every packed row, every time; stores nothing."""

    def __call__(self, batch: Batch, layout: Layout) -> Features:
        """Return the Features of a batch."""
        device = self.target.device
        mask = mask4d(batch.document_ids.to(device))
        taps, last = self.target.hidden(batch.ids.to(device), batch.position_ids.to(device), mask, self.taps)
        last = last.flatten(0, 1)[layout.teacher.to(device)]
        return self._features(taps.flatten(0, 1)[layout.active.to(device)], last, target_choice(self.target, last))

    def flush(self) -> None:
        """Nothing is kept."""


@dataclass(frozen=True)
class _Entry:
    shard: Path
    checksum: int


class CachedFeatures(_Teaching):
    """Runs the target once per document, alone, and keeps bf16 taps, last hidden states and its choices on disk.

    A document is run by itself so that its numbers do not depend on its neighbours in a row: a resumed run reads
    what another one would have computed. Per token it takes 2 * (taps + 1) * Ht bytes.
    """

    def __init__(
        self, target: Target, taps: tuple[int, ...], t2d: Tensor, dtype: torch.dtype, folder: Path, rank: int = 0
    ) -> None:
        """Open or make the store of this target, its taps and dtype under `folder`."""
        super().__init__(target, taps, t2d, dtype)
        identity = {
            **{name: value for name, value in target.fingerprint.items() if name.endswith("sha256")},
            "taps": list(taps),
            "target_dtype": str(target.dtype),
            "format_version": FORMAT_VERSION,
        }
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self.folder = folder / key[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rank = rank
        atomic_write_json(self.folder / "store.json", {"target": target.name, **identity})
        self._index: dict[str, _Entry] = {}
        self._open: dict[Path, safe_open] = {}
        self._fresh: dict[str, dict[str, Tensor]] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            self._register(path)

    def bytes_per_token(self) -> int:
        """Return the bytes one token takes in the store."""
        return 2 * (len(self.taps) + 1) * self.target.hidden_size

    def reserve(self, tokens: int) -> None:
        """Say how large the store may become; raises ArtifactError when the disk cannot hold `tokens` tokens."""
        needed, free = tokens * self.bytes_per_token(), shutil.disk_usage(self.folder).free
        present = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        log.info("feature store %s: %.2f GB present, up to %.2f GB in all", self.folder, present / 1e9, needed / 1e9)
        if needed - present > free:
            raise ArtifactError(
                f"the feature store {self.folder} may need {(needed - present) / 1e9:.2f} GB more, the disk has "
                f"{free / 1e9:.2f} GB free. Set trainer.features=online, fewer prompts, or another output_dir."
            )

    def __call__(self, batch: Batch, layout: Layout) -> Features:
        """Return the Features of a batch, from the store where it has them."""
        found = []
        for row in range(batch.ids.shape[0]):
            documents = batch.document_ids[row]
            for number in range(int(documents.max()) + 1):
                where = documents == number
                found.append(self._document(batch.ids[row][where], batch.loss_mask[row][where]))
        if not found:
            size = self.target.hidden_size
            empty = torch.empty(0, dtype=torch.int64)
            return self._features(torch.empty(0, len(self.taps) * size), torch.empty(0, size), empty)
        taps, last, choice = (torch.cat([entry[name] for entry in found]) for name in ("taps", "last", "choice"))
        return self._features(taps, last, choice)

    def _document(self, ids: Tensor, answers: Tensor) -> dict[str, Tensor]:
        key = hashlib.sha256(ids.numpy().tobytes() + answers.numpy().tobytes()).hexdigest()
        if key in self._fresh:
            return self._fresh[key]
        if key in self._index:
            return self._read(key)
        device = self.target.device
        mask = torch.ones(len(ids), len(ids), dtype=torch.bool, device=device).tril()[None, None]
        positions = torch.arange(len(ids), device=device)[None]
        taps, last = self.target.hidden(ids[None].to(device), positions, mask, self.taps)
        last = last[0, :-1][answers[1:].to(device)]
        tensors = {
            "taps": taps[0, :-1].to(torch.bfloat16).cpu(),
            "last": last.to(torch.bfloat16).cpu(),
            "choice": target_choice(self.target, last).cpu(),
        }
        self._fresh[key] = tensors
        if sum(t.nbytes for entry in self._fresh.values() for t in entry.values()) >= SHARD_BYTES:
            self.flush()
        return tensors

    def flush(self) -> None:
        """Write the documents computed since the last shard as a new one."""
        if not self._fresh:
            return
        tensors = {f"{key}.{name}": t.contiguous() for key, entry in self._fresh.items() for name, t in entry.items()}
        checksums = {key: str(_checksum(entry)) for key, entry in self._fresh.items()}
        count = len(list(self.folder.glob(f"{self.rank:05d}-*.safetensors")))
        path = self.folder / f"{self.rank:05d}-{count:06d}.safetensors"
        temp = path.with_suffix(".tmp")
        save_file(tensors, temp, metadata=checksums)
        os.replace(temp, path)
        self._fresh = {}
        self._register(path)

    def _register(self, path: Path) -> None:
        try:
            shard = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ArtifactError(f"{path} is damaged ({error}). Delete it: its documents are computed again.") from error
        self._open[path] = shard
        self._index.update({key: _Entry(path, int(value)) for key, value in shard.metadata().items()})

    def _read(self, key: str) -> dict[str, Tensor]:
        entry = self._index[key]
        shard = self._open[entry.shard]
        tensors = {name: shard.get_tensor(f"{key}.{name}") for name in ("taps", "last", "choice")}
        found = _checksum(tensors)
        if found != entry.checksum:
            raise ArtifactError(
                f"{entry.shard}: document {key[:12]} has checksum {found}, {entry.checksum} was written. "
                "Delete the file: its documents are computed again."
            )
        return tensors


def _checksum(tensors: dict[str, Tensor]) -> int:
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].contiguous().view(torch.uint8).numpy(), total)
    return total
