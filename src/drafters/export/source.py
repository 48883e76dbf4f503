"""What a dialect is written from: a loaded export and its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafters.artifacts import atomic_write_json
from drafters.contract import INDEX_NAME, Contract
from drafters.export.official import CONFIG_NAME
from drafters.models.base import Drafter
from drafters.target import Target

WEIGHTS_NAME = "model.safetensors"
VOCAB = ("d2t", "t2d")


@dataclass(frozen=True)
class Source:
    """A drafter as load_drafter gives it, its contract, its target (tuned, where it tunes one) and its folder."""

    drafter: Drafter
    contract: Contract
    target: Target
    folder: Path

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The export's tensors under the drafter's own names, d2t [Vd] and t2d [V] among them, bit for bit."""
        from drafters.export.native import stored_tensors  # it needs the dialects, which need this module

        return stored_tensors(self.folder, self.contract, self.target)

    @property
    def graph(self) -> dict[str, Any]:
        """Sizes and flags of the contract."""
        return self.contract.graph

    @property
    def weights(self) -> dict[str, Tensor]:
        """`tensors` without the draft vocabulary."""
        return {name: tensor for name, tensor in self.tensors.items() if name not in VOCAB}

    @property
    def reduced(self) -> bool:
        """Whether it drafts from a part of the target's vocabulary only."""
        return self.graph["draft_vocab_size"] < self.graph["vocab_size"]

    @property
    def target_path(self) -> str:
        """What loads the target: its hub id, or where it is on this machine, for its name alone loads nothing."""
        same = self.contract.target == self.target.config.path
        return self.contract.target if same else str(self.target.folder)

    @property
    def embedding(self) -> Tensor:
        """The target's input embedding [V, Ht]."""
        return kept(self.target.embed_weight)

    @property
    def head(self) -> Tensor:
        """The target's output head [V, Ht]."""
        return kept(self.target.head_weight)

    @property
    def draft_head(self) -> Tensor:
        """The rows [Vd, Ht] of the target's output head that the draft vocabulary keeps."""
        return kept(self.target.head_weight[self.tensors["t2d"].to(self.target.device)])


def kept(weight: Tensor) -> Tensor:
    """A weight on the CPU, in 16 bits where that changes no number: a rounded one would be another model's."""
    weight = weight.detach().cpu()
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(weight.to(dtype).to(weight.dtype), weight):
            return weight.to(dtype)
    return weight


def save_weights(folder: Path, tensors: Mapping[str, Tensor], name: str = WEIGHTS_NAME) -> None:
    """Write a dialect's tensors as one safetensors file; two names of one storage become two tensors."""
    save_file(
        {key: tensor.contiguous().clone() for key, tensor in tensors.items()}, folder / name, metadata={"format": "pt"}
    )


def write_index(folder: Path, names: list[str]) -> None:
    """Say that all of these tensors, and nothing beside them, are in model.safetensors.

    vLLM and SGLang read every *.safetensors of a folder without an index, a probe or a vocabulary included.
    """
    size = (folder / WEIGHTS_NAME).stat().st_size
    index = {"metadata": {"total_size": size}, "weight_map": {name: WEIGHTS_NAME for name in sorted(names)}}
    atomic_write_json(folder / INDEX_NAME, index)


def save_config(folder: Path, config: dict[str, Any], name: str = CONFIG_NAME) -> None:
    """Write a dialect's config.json."""
    atomic_write_json(folder / name, config)
