"""Medusa and Hydra heads in their own projects' names (Medusa: medusa/train/train_legacy.py, Hydra: hydra/model)."""

from __future__ import annotations

from typing import Any

from drafters.contract import Contract
from drafters.export.official import CONFIG_NAME
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
