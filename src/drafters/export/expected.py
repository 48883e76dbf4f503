"""What a dialect's folder must hold for one drafter, worked out anew from its native export's own files.

Written apart from the dialects' writers, so that a mistake there is a difference here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.contract import Contract, read_contract
from drafters.errors import ContractError
from drafters.export.probe import read_tensors
from drafters.target import Target

Tensors = dict[str, Tensor]
MEDUSA_FILE = "medusa_lm_head.safetensors"
VOCAB = ("d2t", "t2d")
FAMILIES = ("eagle", "eagle3", "hydra", "medusa", "medusa2", "mtp", "small")
_FILES = {"medusa": MEDUSA_FILE, "medusa2": MEDUSA_FILE, "hydra": "hydra_lm_head.safetensors"}


class OneOf(tuple):
    """Any of these values may stand in a config."""


@dataclass(frozen=True)
class Native:
    """A native export: its contract, config.json, and tensors by its files' own names, d2t and t2d among them."""

    folder: Path
    contract: Contract
    config: dict[str, Any]
    tensors: Tensors
    target: Target

    @classmethod
    def read(cls, folder: Path, target: Target) -> Native:
        """Read the files as they are; ArtifactError or ContractError names what is not there."""
        contract = read_contract(folder)
        if contract.family not in FAMILIES:
            raise ContractError(
                f"{folder}: family is {contract.family!r}, this code knows {', '.join(FAMILIES)}. Use the Outrider "
                "version that wrote it."
            )
        tensors, _ = read_tensors(folder / weights_name(contract.family))
        beside = folder / "draft_vocab.safetensors"
        if beside.is_file():
            tensors |= read_tensors(beside)[0]
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return cls(folder, contract, config, tensors, target)

    @property
    def graph(self) -> dict[str, Any]:
        """Sizes and flags of the contract."""
        return self.contract.graph

    @property
    def reduced(self) -> bool:
        """Whether the draft vocabulary is a part of the target's."""
        return self.graph["draft_vocab_size"] < self.graph["vocab_size"]

    @property
    def weights(self) -> Tensors:
        """The tensors without the draft vocabulary."""
        return {name: tensor for name, tensor in self.tensors.items() if name not in VOCAB}

    @property
    def embedding(self) -> Tensor:
        """The target's embedding [V, Ht], in 16 bits where those hold its numbers."""
        return _narrow(self.target.embed_weight)

    @property
    def head(self) -> Tensor:
        """The target's output head [V, Ht], likewise."""
        return _narrow(self.target.head_weight)

    @property
    def kept_ids(self) -> Tensor:
        """The target's ids of the draft vocabulary, [Vd]."""
        return torch.arange(len(self.tensors["d2t"])) + self.tensors["d2t"]

    @property
    def target_names(self) -> OneOf:
        """What a serve command or another engine may call the target: its hub id, or its folder."""
        name, places = self.contract.target, [str(self.target.folder)]
        return OneOf([name, *places] if name.count("/") == 1 else places)


def weights_name(family: str) -> str:
    """The file of tensors in a family's native export."""
    return _FILES.get(family, "model.safetensors")


def _narrow(weight: Tensor) -> Tensor:
    weight = weight.detach().cpu()
    fits = (kind for kind in (torch.bfloat16, torch.float16) if torch.equal(weight, weight.to(kind).to(weight.dtype)))
    return weight.to(next(fits, weight.dtype))


# ---- tensors


def _eagle3(native: Native) -> Tensors:
    # Where the sizes are equal vLLM has no map to put d2t into, and refuses the file for it.
    own = native.tensors if native.reduced else native.weights
    return {"lm_head.weight": native.head[native.kept_ids]} | own


def _speculators(native: Native) -> Tensors:
    found = {"embed_tokens.weight": native.embedding} | _eagle3(native)
    return {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in found.items()}


def _eagle_vllm(native: Native) -> Tensors:
    return {name: tensor for name, tensor in native.weights.items() if name != "fc.bias"}


def _eagle_sglang(native: Native) -> Tensors:
    weight = native.weights["fc.weight"]
    return {"fc.bias": torch.zeros(weight.shape[0], dtype=weight.dtype)} | native.weights


def _medusa_vllm(native: Native) -> Tensors:
    found: Tensors = {}
    for name, tensor in native.weights.items():
        head, part, *rest = name.split(".")
        inside = rest[:1] == ["linear"]
        found[f"blocks.{head}.layers.{part}.{rest[1]}" if inside else f"lm_heads.{head}.weight"] = tensor
    if not native.graph["own_heads"]:
        found["lm_head.weight"] = native.head[native.kept_ids]
    return found | ({"token_map": native.kept_ids} if native.reduced else {})


def _merged(native: Native) -> Tensors:
    found: Tensors = {}
    seen: set[int] = set()
    for name, tensor in native.target.model.state_dict().items():
        if tensor.data_ptr() not in seen:
            found[name] = tensor.detach().cpu()
        seen.add(tensor.data_ptr())
    return found | {f"medusa_head.{name}": tensor for name, tensor in native.weights.items()}


def _mtp_parts(native: Native) -> tuple[Tensors, Tensor, Tensor]:
    """The module's tensors without their prefix, the embedding and the output head."""
    inner = {
        name.split(".", 3)[-1]: tensor for name, tensor in native.weights.items() if name.startswith("model.layers.")
    }
    return (
        inner,
        native.weights.get("embed_tokens.weight", native.embedding),
        native.weights.get("lm_head.weight", native.head),
    )


def _mtp_deepseek(native: Native) -> Tensors:
    inner, embedding, head = _mtp_parts(native)
    inner |= {"embed_tokens.weight": embedding, "shared_head.head.weight": head}
    return {f"model.layers.{native.target.num_layers}.{name}": tensor for name, tensor in inner.items()}


_QWEN = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm"}


def _mtp_qwen3next(native: Native) -> Tensors:
    inner, embedding, head = _mtp_parts(native)
    found = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    for name, tensor in inner.items():
        part = name.removesuffix(".weight")
        found[f"mtp.{_QWEN[part]}.weight" if part in _QWEN else f"mtp.layers.0.{name}"] = tensor
    return found


TENSORS: dict[str, Callable[[Native], Tensors]] = {
    "eagle3": _eagle3,
    "speculators": _speculators,
    "eagle-vllm": _eagle_vllm,
    "eagle-sglang": _eagle_sglang,
    "medusa-v1": lambda native: native.weights,
    "medusa-v2": lambda native: native.weights,
    "medusa-vllm": _medusa_vllm,
    "medusa2-merged": _merged,
    "mtp-deepseek": _mtp_deepseek,
    "mtp-qwen3next": _mtp_qwen3next,
    "small": lambda native: native.weights,
}
