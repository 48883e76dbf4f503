"""A small model as a plain Hugging Face folder, which transformers, vLLM and SGLang take as a draft model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from drafters.contract import Contract
from drafters.export.official import CONFIG_NAME, decoder_config
from drafters.export.source import Source, kept, save_config, save_weights
from drafters.target import Target


def small_name(name: str) -> str:
    """The name in a LlamaForCausalLM's file of one of the drafter's own tensors."""
    return f"model.{name}"


def _tied(contract: Contract, target: Target) -> bool:
    if contract.graph["hidden_size"] != contract.graph["target_hidden_size"]:
        return True  # an embedding of its own is its head too
    return target.head_weight.data_ptr() == target.embed_weight.data_ptr()


def small_configs(contract: Contract, target: Target) -> dict[str, dict[str, Any]]:
    """Return config.json of a LlamaForCausalLM."""
    graph = contract.graph
    config = decoder_config(contract, target, graph["hidden_size"]) | {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": graph["num_layers"],
        "tie_word_embeddings": _tied(contract, target),
        "eos_token_id": list(target.eos_ids),
    }
    return {CONFIG_NAME: config}


def small_repeated(contract: Contract, target: Target) -> dict[str, Tensor]:
    """The target's embedding, and its head where that is another matrix, which a model on its own has to bring."""
    if contract.graph["hidden_size"] != contract.graph["target_hidden_size"]:
        return {}
    tensors = {"model.embed_tokens.weight": target.embed_weight}
    if not _tied(contract, target):
        tensors["lm_head.weight"] = target.head_weight
    return {name: kept(weight) for name, weight in tensors.items()}


def small_complete(folder: Path, target: Target) -> None:
    """Write the tokenizer and which tokens end a text."""
    target.tokenizer.save_pretrained(folder, save_jinja_files=False)
    ends = {"bos_token_id": target.tokenizer.bos_token_id, "eos_token_id": list(target.eos_ids)}
    GenerationConfig(**ends).save_pretrained(folder)


def write_small(source: Source, folder: Path) -> None:
    """Write a whole model of the target's vocabulary: config.json, model.safetensors, tokenizer, generation config."""
    save_config(folder, small_configs(source.contract, source.target)[CONFIG_NAME])
    own = {small_name(name): tensor for name, tensor in source.weights.items()}
    save_weights(folder, own | small_repeated(source.contract, source.target))
    small_complete(folder, source.target)
