"""Response records as one small file: ids in a safetensors table, compressed by xz; lossless, no pickle."""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from drafters.corpus import FINISH_REASONS, ResponseRecord
from drafters.errors import ArtifactError

VERSION = 1


def encode(records: Sequence[ResponseRecord]) -> bytes:
    """Return the records as the bytes of a .safetensors.xz file; ids take two bytes each where they fit."""
    prompts = [token for record in records for token in record.prompt_ids]
    responses = [token for record in records for token in record.response_ids]
    width = np.uint16 if max(prompts + responses, default=0) < 2**16 else np.uint32
    tensors = {
        "prompt_ids": np.array(prompts, dtype=width),
        "response_ids": np.array(responses, dtype=width),
        "prompt_lengths": np.array([len(record.prompt_ids) for record in records], dtype=np.uint32),
        "response_lengths": np.array([len(record.response_ids) for record in records], dtype=np.uint32),
        "finish_reasons": np.array(
            [FINISH_REASONS.index(record.finish_reason) for record in records], dtype=np.uint8
        ),
        "seeds": np.array([record.seed for record in records], dtype=np.int64),
    }
    columns = {
        "version": VERSION,
        "id": [record.id for record in records],
        "category": [record.category for record in records],
        "temperature": [record.temperature for record in records],
    }
    # One metadata entry: safetensors writes several in random order, and equal sets must give equal bytes.
    metadata = {"records": json.dumps(columns, ensure_ascii=False)}
    return lzma.compress(save(tensors, metadata=metadata), preset=9 | lzma.PRESET_EXTREME)


def decode(data: bytes, where: str) -> list[ResponseRecord]:
    """Read what encode() wrote; ArtifactError names `where` when the bytes are cut, altered or foreign."""
    try:
        plain = lzma.decompress(data, format=lzma.FORMAT_XZ)
        tensors = load(plain)
        columns = json.loads(_metadata(plain)["records"])
        if columns["version"] != VERSION:
            raise ArtifactError(
                f"{where}: packed responses of version {columns['version']}, this code reads {VERSION}. "
                "Pack them again with this version."
            )
        prompts = _cut(tensors["prompt_ids"], tensors["prompt_lengths"])
        responses = _cut(tensors["response_ids"], tensors["response_lengths"])
        reasons = [FINISH_REASONS[code] for code in tensors["finish_reasons"].tolist()]
        seeds = tensors["seeds"].tolist()
        rows = zip(
            columns["id"],
            columns["category"],
            prompts,
            responses,
            reasons,
            columns["temperature"],
            seeds,
            strict=True,
        )
        return [ResponseRecord(*row) for row in rows]
    except (lzma.LZMAError, EOFError, SafetensorError, KeyError, IndexError, ValueError) as error:
        raise ArtifactError(
            f"{where} is not a set of packed responses ({type(error).__name__}: {error}). "
            "Copy it again, or pack the responses again."
        ) from error


def _metadata(plain: bytes) -> dict[str, Any]:
    """Read the header that safetensors.numpy.load leaves out; layout: 8 bytes of length, then JSON."""
    length = int.from_bytes(plain[:8], "little")
    return json.loads(plain[8 : 8 + length])["__metadata__"]


def _cut(ids: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    ends = list(accumulate(lengths.tolist(), initial=0))
    if ends[-1] != len(ids):
        raise ValueError(f"lengths add up to {ends[-1]} but there are {len(ids)} ids")
    flat = ids.tolist()
    return [flat[start:end] for start, end in pairwise(ends)]
