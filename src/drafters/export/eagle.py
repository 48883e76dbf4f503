"""EAGLE-1 in its own names (EAGLE: eagle/model/cnets1.py), as vLLM reads it."""

from __future__ import annotations

from typing import Any

from drafters.contract import Contract
from drafters.export.official import CONFIG_NAME, decoder_config
from drafters.target import Target


def eagle_configs(contract: Contract, target: Target) -> dict[str, dict[str, Any]]:
    """Return config.json: a Llama of one layer; `bias` is false because the reference takes its absence for true."""
    config = decoder_config(contract, target, contract.graph["target_hidden_size"])
    return {CONFIG_NAME: {"architectures": ["LlamaForCausalLM"], "bias": False} | config}


def eagle_name(name: str) -> str:
    """The file's name of a tensor: `fc.weight` stands alone, the layer is `layers.0`."""
    part = name.removeprefix("block.")
    return part if part == name or part.startswith("fc.") else f"layers.0.{part}"
