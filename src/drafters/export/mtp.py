"""An MTP module in DeepSeek-V3's names and in Qwen3-Next's, as a checkpoint of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.contract import Contract
from drafters.export.official import CONFIG_NAME, decoder_config
from drafters.export.source import Source, save_config, save_weights
from drafters.target import Target


def mtp_configs(contract: Contract, target: Target) -> dict[str, dict[str, Any]]:
    """Return config.json: the target's sizes, and one layer behind its last one."""
    graph = contract.graph
    config = decoder_config(contract, target, graph["target_hidden_size"]) | {
        "architectures": [f"{type(target.model).__name__}NextN"],
        "model_type": target.text_config.model_type,
        "num_hidden_layers": graph["layer_index"],
        "num_nextn_predict_layers": 1,
        "draft_vocab_size": graph["draft_vocab_size"],
        "attention_bias": graph["qkv_bias"],
    }
    return {CONFIG_NAME: config}


# ---- with what engines expect beside the module


def mtp_problem(source: Source) -> str | None:
    """What neither naming has a place for."""
    if source.graph.get("own_head") and source.reduced:
        return (
            f"its output head has rows for {source.graph['draft_vocab_size']} of {source.graph['vocab_size']} ids, and "
            "MTP has no place for a draft vocabulary"
        )
    return None


def _parts(source: Source) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The module's tensors without DeepSeek's prefix, the embedding and the output head, which are the target's where
    it has none of its own."""
    prefix, tensors = f"model.layers.{source.graph['layer_index']}.", source.weights
    embedding = tensors.pop("embed_tokens.weight", None)
    head = tensors.pop("lm_head.weight", None)
    inner = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return inner, source.embedding if embedding is None else embedding, source.head if head is None else head


def write_mtp_deepseek(source: Source, folder: Path) -> None:
    """Write config.json and model.safetensors: one layer behind the target's last, its embedding and head in it."""
    prefix = f"model.layers.{source.graph['layer_index']}."
    inner, embedding, head = _parts(source)
    inner |= {"embed_tokens.weight": embedding, "shared_head.head.weight": head}
    config = mtp_configs(source.contract, source.target)[CONFIG_NAME]
    save_config(folder, config | {"draft_vocab_size": source.graph["vocab_size"]})
    save_weights(folder, {prefix + name: tensor for name, tensor in inner.items()})


QWEN3NEXT = {
    "eh_proj.weight": "fc.weight",
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "shared_head.norm.weight": "norm.weight",
}


def qwen3next_name(name: str) -> str:
    """The file's name of a tensor of the module."""
    return f"mtp.{QWEN3NEXT.get(name, f'layers.0.{name}')}"


def write_mtp_qwen3next(source: Source, folder: Path) -> None:
    """Write config.json and model.safetensors; embedding and head have the names they have in a whole model.

    A norm's weight is the factor itself, as in the target's layers; Qwen3-Next's own models keep it less one.
    """
    inner, embedding, head = _parts(source)
    tensors = {qwen3next_name(name): tensor for name, tensor in inner.items()}
    config = mtp_configs(source.contract, source.target)[CONFIG_NAME]
    del config["num_nextn_predict_layers"]
    sizes = {"mtp_num_hidden_layers": 1, "draft_vocab_size": source.graph["vocab_size"]}
    save_config(folder, config | {"architectures": ["Qwen3NextMTP"]} | sizes)
    save_weights(folder, tensors | {"model.embed_tokens.weight": embedding, "lm_head.weight": head})
