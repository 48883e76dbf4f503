"""How each family's native export names its files and tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from drafters.contract import Contract
from drafters.export.official import CONFIG_NAME, official_configs
from drafters.target import Target

__all__ = ["CONFIG_NAME", "DIALECTS", "EXPORT_DTYPE", "VOCAB_NAME", "Dialect"]

EXPORT_DTYPE = torch.bfloat16
VOCAB_NAME = "draft_vocab.safetensors"  # d2t and t2d, where the ecosystem's weights file has no place for them


def same(name: str) -> str:
    """The drafter's own tensor names are the ecosystem's."""
    return name


@dataclass(frozen=True)
class Dialect:
    """title: the family in prose. use: which engine reads the folder, for the card. weights: the file of tensors.
    vocab_inside: d2t and t2d are among them. configs: the JSON files engines read, config.json among them. rename: a
    drafter's tensor name to the file's."""

    title: str
    use: str
    weights: str
    vocab_inside: bool
    configs: Callable[[Contract, Target], dict[str, dict[str, Any]]]
    rename: Callable[[str], str] = same


DIALECTS = {
    "eagle3": Dialect(
        "EAGLE-3",
        "The names and config.json follow the official EAGLE-3 layout, which vLLM (`method: eagle3`) and SGLang "
        "(`--speculative-algorithm EAGLE3`) read. With custom taps, SGLang needs `config.sglang.json` in place of "
        "`config.json`.",
        "model.safetensors",
        True,
        official_configs,
    ),
}
