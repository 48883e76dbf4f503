"""Medusa and Hydra heads in their own projects' names (Medusa: medusa/train/train_legacy.py, Hydra: hydra/model)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.contract import Contract
from drafters.export.official import CONFIG_NAME, EXPORT_DTYPE
from drafters.export.source import Source, save_config, save_weights
from drafters.target import Target


def medusa_configs(contract: Contract, target: Target) -> dict[str, dict[str, Any]]:
    """Return config.json; it has no `architectures`, with which TGI would take the folder for no Medusa at all."""
    graph = contract.graph
    config = {
        "medusa_num_heads": graph["num_heads"],
        "medusa_num_layers": graph["num_layers"],
        "base_model_name_or_path": contract.target,
    }
    return {CONFIG_NAME: config if graph["own_heads"] else config | {"version": "2"}}


def medusa_name(name: str) -> str:
    """Head i's blocks are `{i}.{j}.linear`, its own output head after n of them is `{i}.{n}`."""
    return name.removeprefix("heads.")


# ---- Medusa as engines read it

MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"


def medusa_v1_problem(source: Source) -> str | None:
    """What Medusa's first layout has no place for."""
    if not source.graph["own_heads"]:
        return "its heads read the target's output head, where the first layout has one in every head"
    return reduced_heads(source)


def medusa_v2_problem(source: Source) -> str | None:
    """What Medusa's second layout has no place for."""
    if source.graph["own_heads"]:
        return "each of its heads has an output head of its own, where the second layout reads the target's"
    return None


def reduced_heads(source: Source) -> str | None:
    """Why output heads that have no row for some ids cannot be written where nothing says which rows they have."""
    if not (source.graph["own_heads"] and source.reduced):
        return None
    return (
        f"its output heads have rows for {source.graph['draft_vocab_size']} of {source.graph['vocab_size']} ids, and "
        "the layout has no place for a draft vocabulary"
    )


def write_medusa(source: Source, folder: Path) -> None:
    """Write config.json and medusa_lm_head.safetensors, as TGI and Medusa's trainer have them, in either layout."""
    config = medusa_configs(source.contract, source.target)[CONFIG_NAME]
    # TGI is given this folder alone and loads the target from what it names.
    save_config(folder, config | {"base_model_name_or_path": source.target_path})
    save_weights(folder, {medusa_name(name): tensor for name, tensor in source.weights.items()}, MEDUSA_WEIGHTS)


def medusa_vllm_config(source: Source) -> dict[str, Any]:
    """Return config.json of vLLM's MedusaModel, as versions before 0.33 have it."""
    graph = source.graph
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": graph["target_hidden_size"],
        "vocab_size": graph["vocab_size"],
        "truncated_vocab_size": graph["draft_vocab_size"],
        "num_heads": graph["num_heads"],
        "num_hidden_layers": graph["num_layers"],
        "max_paths": 64,  # vLLM's own defaults, which it asks for and does not use
        "topk": 10,
        "medusa_fc_bias": True,
        "original_lm_head": not graph["own_heads"],
        "torch_dtype": EXPORT_DTYPE,
    }


def medusa_vllm_name(name: str, layers: int) -> str:
    """`heads.{i}.{j}.linear` is `blocks.{i}.layers.{j}`, and output head `heads.{i}.{layers}` is `lm_heads.{i}`."""
    _, head, part, rest = name.split(".", 3)
    if int(part) == layers:
        return f"lm_heads.{head}.{rest}"
    return f"blocks.{head}.layers.{part}.{rest.removeprefix('linear.')}"


def write_medusa_vllm(source: Source, folder: Path) -> None:
    """Write config.json and model.safetensors; the target's output head is in it where the heads read it."""
    layers = source.graph["num_layers"]
    tensors = {medusa_vllm_name(name, layers): tensor for name, tensor in source.weights.items()}
    if not source.graph["own_heads"]:
        tensors["lm_head.weight"] = source.draft_head
    if source.reduced:
        tensors["token_map"] = token_map(source)
    save_config(folder, medusa_vllm_config(source))
    save_weights(folder, tensors)


def token_map(source: Source) -> Tensor:
    """The target's id of every draft id, int64 [Vd]."""
    return source.tensors["t2d"].nonzero().flatten()


# ---- Hydra


def hydra_configs(contract: Contract, target: Target) -> dict[str, dict[str, Any]]:
    """Return config.json."""
    graph = contract.graph
    config = {
        "hydra_num_heads": graph["num_heads"],
        "hydra_num_layers": graph["num_layers"],
        "hydra_head_arch": "prefix-mlp" if graph["prefix"] else "mlp",
        "base_model_name_or_path": contract.target,
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "dropout_rate": 0.0,
    }
    return {CONFIG_NAME: config}


def hydra_name(name: str) -> str:
    """Hydra numbers a dropout before every block and output head; its prefix layer is a model of one layer."""
    part, _, rest = name.partition(".")
    if part == "blocks":
        head, layer, rest = rest.split(".", 2)
        return f"hydra_mlp.{head}.{2 * int(layer) + 1}.{rest}"
    if part == "lm_heads":
        head, rest = rest.split(".", 1)
        return f"hydra_lm_head.{head}.1.{rest}"
    inside = {"prefix_layer": "layers.0", "prefix_norm": "norm"}
    return f"prefix_embeding_layer.{inside[part]}.{rest}" if part in inside else name
