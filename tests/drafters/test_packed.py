"""Packed response sets: lossless, small, equal bytes for equal records; damage is refused."""

from __future__ import annotations

import json
import lzma
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters import packed
from drafters.corpus import ResponseRecord
from drafters.errors import ArtifactError

SET = [
    ResponseRecord("a", "chat", [1, 2, 3], [4, 5], "stop", 0.0, 7),
    ResponseRecord("b\u2028é", "code", [1], [6], "length", 0.5, 2**31 - 1),
]
RECORDS = st.lists(
    st.builds(
        ResponseRecord,
        id=st.text(max_size=6),
        category=st.sampled_from(["chat", "code"]),
        prompt_ids=st.lists(st.integers(0, 2**16 - 1), max_size=5),
        response_ids=st.lists(st.integers(0, 2**16 - 1), max_size=5),
        finish_reason=st.sampled_from(["stop", "length"]),
        temperature=st.floats(0, 2),
        seed=st.integers(0, 2**62),
    ),
    max_size=6,
)


@settings(max_examples=20, deadline=None)  # each opens the compressor's 64 MiB window
@given(RECORDS, st.booleans())
def test_packing_is_lossless(records: list[ResponseRecord], large: bool) -> None:
    if large and records:  # an id beyond two bytes
        records = [replace(records[0], response_ids=[200_000, 2**31]), *records[1:]]
    assert packed.decode(packed.encode(records), "set") == records


def test_equal_records_give_equal_bytes() -> None:
    assert len({packed.encode(SET) for _ in range(8)}) == 1


def test_packed_ids_take_under_two_bytes() -> None:
    # Zipf-like ids without repeated phrases: real text is easier (1.1 bytes per response token on SmolLM2's).
    ids = [int(49_000 / (1 + (k * 7919) % 3001)) for k in range(6000)]
    records = [
        ResponseRecord(f"r{i}", "chat", [1, 9690, 198], ids[i * 100 : i * 100 + 100], "stop", 0.0, i)
        for i in range(60)
    ]
    assert len(packed.encode(records)) < 2 * 6000


def damaged(data: bytes) -> dict[str, bytes]:
    plain = lzma.decompress(data)
    return {
        "cut": data[: len(data) // 2],
        "foreign": b"hello",
        "no safetensors": lzma.compress(b"hello"),
        "other version": lzma.compress(plain.replace(b'version\\": 1', b'version\\": 9')),
        "no column": lzma.compress(plain.replace(b'category\\"', b'categorx\\"')),
        "no tensor": lzma.compress(plain.replace(b'"prompt_ids"', b'"prompt_xds"')),
    }


@pytest.mark.parametrize("kind", damaged(packed.encode([])))
def test_damaged_packed_sets_are_refused(kind: str) -> None:
    data = packed.encode(SET)
    assert packed.decode(data, "set.xz") == SET
    with pytest.raises(ArtifactError, match=r"set\.xz"):
        packed.decode(damaged(data)[kind], "set.xz")


def test_lengths_that_do_not_add_up_are_refused() -> None:
    from safetensors.numpy import load, save

    plain = lzma.decompress(packed.encode(SET))
    tensors = load(plain)
    tensors["response_lengths"] = tensors["response_lengths"] + 1
    metadata = json.loads(plain[8 : 8 + int.from_bytes(plain[:8], "little")])["__metadata__"]
    with pytest.raises(ArtifactError, match="lengths add up to"):
        packed.decode(lzma.compress(save(tensors, metadata=metadata)), "set.xz")
