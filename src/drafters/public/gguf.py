"""An EAGLE-3 drafter as llama.cpp has it: one GGUF file, read as the folder of a drafter in the official names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drafters.errors import ArtifactError
from drafters.export.gguf import ARCHITECTURE, TENSORS, interleaved
from drafters.public.folder import PublicFolder

if TYPE_CHECKING:
    from gguf import GGUFReader

# config.json's names of llama.cpp's sizes, and whether a drafter cannot do without.
SIZES = {
    "embedding_length": ("hidden_size", True),
    "feed_forward_length": ("intermediate_size", True),
    "attention.head_count": ("num_attention_heads", True),
    "attention.head_count_kv": ("num_key_value_heads", False),
    "attention.key_length": ("head_dim", False),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", True),
    "context_length": ("max_position_embeddings", False),
    "rope.freq_base": ("rope_theta", False),
    "block_count": ("num_hidden_layers", True),
    "vocab_size": ("vocab_size", False),
    "target_layers": ("eagle_aux_hidden_state_layer_ids", True),
    "target_hidden_size": ("target_hidden_size", False),
    "norm_before_residual": ("norm_before_residual", False),
    "norm_before_fc": ("norm_before_fc", False),
}


@dataclass(frozen=True)
class GgufFolder(PublicFolder):
    """A folder whose tensors were read from a GGUF file, under the official names."""

    tensors: dict[str, Tensor]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self.finite(name, self.tensors[name]) for name in names}


def open_gguf(path: Path) -> GgufFolder | None:
    """The drafter among a folder's GGUF files; None where it has none. ArtifactError names what is wrong."""
    files = sorted(path.glob("*.gguf"))
    if not files:
        return None
    from gguf import GGUFReader

    readers = {file: GGUFReader(file) for file in files}
    found = [file for file, reader in readers.items() if _field(reader, "general.architecture") == ARCHITECTURE]
    if len(found) != 1:
        names = ", ".join(file.name for file in files)
        raise ArtifactError(
            f"{path} holds {names}, of which {len(found) or 'none'} are of architecture {ARCHITECTURE}. Give a folder "
            "with one such file."
        )
    return _read(path, found[0], readers[found[0]])


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _read(path: Path, file: Path, reader: GGUFReader) -> GgufFolder:
    from gguf.quants import dequantize

    config: dict[str, Any] = {}
    for theirs, (ours, needed) in SIZES.items():
        value = _field(reader, f"{ARCHITECTURE}.{theirs}")
        if value is None and needed:
            raise ArtifactError(f"{file}: {ARCHITECTURE}.{theirs} is missing. Fetch it again.")
        if value is not None:
            config[ours] = value
    scaling = _field(reader, f"{ARCHITECTURE}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise ArtifactError(f"{file}: its rope is scaled ({scaling}), which is not read. Use another engine.")
    heads = config["num_attention_heads"]
    turned = {"q_proj": heads, "k_proj": config.get("num_key_value_heads", heads)}
    own = {theirs: ours for ours, theirs in TENSORS.items()}
    tensors: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        if tensor.name == "d2t":  # the target's ids themselves
            ids = torch.from_numpy(tensor.data.copy()).to(torch.int64)
            tensors["d2t"] = ids - torch.arange(len(ids))
            continue
        if tensor.name not in own:
            raise ArtifactError(f"{file}: tensor {tensor.name} is of no EAGLE-3 drafter. Fetch it again.")
        name = own[tensor.name]
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        part = name.split(".")[-2]
        tensors[name] = halves(weight, turned[part]) if part in turned else weight
    return GgufFolder(path, config, dict.fromkeys(tensors, file), tensors)


def halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of a projection [heads*d, X] in transformers' order again: what interleaved() undoes."""
    order = interleaved(torch.arange(weight.shape[0])[:, None], heads)[:, 0]
    found = torch.empty_like(weight)
    found[order] = weight
    return found
