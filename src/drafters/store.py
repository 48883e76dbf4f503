"""A store of the target's hidden states on disk: checksummed shards of whole documents."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafters.errors import ArtifactError
from drafters.target import Target

SHARD_BYTES = 64 << 20
FORMAT_VERSION = 1
FOLDER = "features"  # the store's place beside collected responses and in a training run's folder


@dataclass(frozen=True)
class _Entry:
    shard: Path
    checksum: int


def document_key(ids: Tensor, answers: Tensor) -> str:
    """The name of a document in a store, from its ids int64 [T] and its answer mask bool [T]."""
    return hashlib.sha256(ids.numpy().tobytes() + answers.numpy().tobytes()).hexdigest()


class FeatureStore:
    """Documents of one target, its taps and dtype: bf16 taps [T - 1, K*Ht], last [A, Ht], choice int64 [A].

    last and choice are the final hidden states, and the target's own tokens, where one of the A answer tokens
    comes next. Per token it takes at most 2 * (K + 1) * Ht bytes.
    """

    def __init__(self, target: Target, taps: tuple[int, ...], folder: Path, rank: int = 0) -> None:
        """Open the store under `folder`, or make it."""
        identity = _identity(target, taps)
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self.folder = folder / key[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.taps, self.rank = taps, rank
        self._size = target.hidden_size
        self.bytes_per_token = 2 * (len(taps) + 1) * target.hidden_size
        about = self.folder / "store.json"
        if not about.exists():
            with self._own_file(about) as temp:
                temp.write_text(json.dumps({"target": target.name, **identity}, indent=2), encoding="utf-8")
        self._index: dict[str, _Entry] = {}
        self._open: dict[Path, safe_open] = {}
        self._fresh: dict[str, dict[str, Tensor]] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            self._register(path)

    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))

    def free(self) -> int:
        """Bytes the disk has left."""
        return shutil.disk_usage(self.folder).free

    def __contains__(self, key: str) -> bool:
        return key in self._fresh or key in self._index

    def get(self, key: str, taps: tuple[int, ...]) -> dict[str, Tensor] | None:
        """A document's tensors with these of the taps, None where the store lacks it; ArtifactError when damaged."""
        if key in self._fresh:
            found = self._fresh[key]
        elif key in self._index:
            found = self._read(key)
        else:
            return None
        if taps == self.taps:
            return found
        parts = dict(zip(self.taps, found["taps"].split(self._size, -1), strict=True))
        return found | {"taps": torch.cat([found["taps"][:, :0], *(parts[index] for index in taps)], -1)}

    def put(self, key: str, taps: Tensor, last: Tensor, choice: Tensor) -> None:
        """Keeps a document, with all taps of the store; written with the shard it falls into."""
        half = torch.bfloat16
        tensors = {"taps": taps.to(half).cpu(), "last": last.to(half).cpu(), "choice": choice.cpu()}
        self._fresh[key] = tensors
        if sum(t.nbytes for entry in self._fresh.values() for t in entry.values()) >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the documents computed since the last shard as a new one."""
        if not self._fresh:
            return
        tensors = {f"{key}.{name}": t.contiguous() for key, entry in self._fresh.items() for name, t in entry.items()}
        checksums = {key: str(_checksum(entry)) for key, entry in self._fresh.items()}
        # Named by what it holds: no shard is ever written over, whoever else writes here or deletes one.
        digest = hashlib.sha256("".join(sorted(checksums)).encode()).hexdigest()
        path = self.folder / f"{self.rank:05d}-{digest[:16]}.safetensors"
        with self._own_file(path) as temp:
            save_file(tensors, temp, metadata=checksums)
        self._fresh = {}
        self._register(path)

    @contextmanager
    def _own_file(self, path: Path) -> Iterator[Path]:
        """A name to write to, put in place of `path` at the end; this process's, for several may share the store."""
        temp = path.with_suffix(f".{os.getpid()}.tmp")
        yield temp
        os.replace(temp, path)

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


def wider_stores(target: Target, taps: tuple[int, ...], folder: Path, rank: int = 0) -> list[FeatureStore]:
    """The stores of this target under `folder` that hold these taps among others."""
    found = []
    for path in sorted(folder.glob("*/store.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if set(taps) <= set(kept["taps"]):
            store = _identity(target, tuple(kept["taps"]))
            if {name: kept.get(name) for name in store} == store:
                found.append(FeatureStore(target, tuple(kept["taps"]), folder, rank))
    return found


def _identity(target: Target, taps: tuple[int, ...]) -> dict[str, Any]:
    hashes = {name: value for name, value in target.fingerprint.items() if name.endswith("sha256")}
    return {
        **hashes,
        "taps": list(taps),
        "target_dtype": str(target.dtype),
        "format_version": FORMAT_VERSION,
    }


def _checksum(tensors: dict[str, Tensor]) -> int:
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].contiguous().view(torch.uint8).numpy(), total)
    return total
