"""EAGLE-1 in its own names (EAGLE: eagle/model/cnets1.py), and as vLLM and SGLang each read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.contract import Contract
from drafters.export.official import CONFIG_NAME, decoder_config
from drafters.export.source import Source, save_config, save_weights
from drafters.target import Target


def eagle_configs(contract: Contract, target: Target) -> dict[str, dict[str, Any]]:
    """Return config.json: a Llama of one layer; `bias` is said even where false, as the reference takes its
    absence for true."""
    config = decoder_config(contract, target, contract.graph["target_hidden_size"])
    bias = contract.graph.get("fc_bias", False)
    return {CONFIG_NAME: {"architectures": ["LlamaForCausalLM"], "bias": bias} | config}


def eagle_name(name: str) -> str:
    """The file's name of a tensor: `fc.weight` stands alone, the layer is `layers.0`."""
    part = name.removeprefix("block.")
    return part if part == name or part.startswith("fc.") else f"layers.0.{part}"


# ---- as engines read it


def _named(source: Source) -> dict[str, Tensor]:
    """The drafter's own tensors by the file's names, the output head by `lm_head.weight` where it has one."""
    return {eagle_name(name): tensor for name, tensor in source.weights.items()}


def eagle_vllm_problem(source: Source) -> str | None:
    """What vLLM's EagleLlamaForCausalLM has no place for."""
    bias = _named(source).get("fc.bias")
    if bias is not None and bool(bias.any()):
        return "its fc has a bias other than zero, where vLLM has none"
    if source.graph.get("own_head") and source.reduced:
        return (
            f"its output head has rows for {source.graph['draft_vocab_size']} of {source.graph['vocab_size']} ids, and "
            "EAGLE-1 has no place for a draft vocabulary"
        )
    return None


def write_eagle_vllm(source: Source, folder: Path) -> None:
    """Write config.json and model.safetensors; embedding and head are the target's where the drafter has none."""
    tensors = _named(source)
    tensors.pop("fc.bias", None)
    save_config(folder, eagle_configs(source.contract, source.target)[CONFIG_NAME] | {"bias": False})
    save_weights(folder, tensors)


def eagle_sglang_problem(source: Source) -> str | None:
    """What SGLang's LlamaForCausalLMEagle has no place for: it takes embedding and head from the target."""
    for part, name in (("own_embedding", "an embedding"), ("own_head", "an output head")):
        if source.graph.get(part):
            return f"it has {name} of its own, in whose place SGLang puts the target's"
    return None


def write_eagle_sglang(source: Source, folder: Path) -> None:
    """Write config.json and model.safetensors; `fc.bias` is always there, as SGLang's fc has one."""
    config = eagle_configs(source.contract, source.target)[CONFIG_NAME]
    save_config(folder, config | {"architectures": ["LlamaForCausalLMEagle"], "bias": True})
    tensors = _named(source)
    weight = tensors["fc.weight"]
    save_weights(folder, {"fc.bias": torch.zeros(weight.shape[0], dtype=weight.dtype)} | tensors)
