"""EAGLE-3 as speculators keeps it (speculators: models/eagle3), which vLLM serves by the draft folder's name alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drafters.export.eagle3 import eagle3_tensors
from drafters.export.official import AUX_LAYERS_KEY, EXPORT_DTYPE, decoder_config
from drafters.export.source import Source, save_config, save_weights

FORMAT = "0.9.0"  # of speculators, whose names these are
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def speculators_problem(source: Source) -> str | None:
    """What an Eagle3DraftModel has no place for."""
    graph = source.graph
    if graph["hidden_size"] != graph["target_hidden_size"]:
        return (
            f"it is {graph['hidden_size']} wide and its target {graph['target_hidden_size']}, where speculators has "
            "one hidden_size for both"
        )
    if graph.get("fc_bias"):
        return "its fc has a bias, where speculators has none"
    if graph.get("norm_before_fc") and graph["fc_norm"]:
        return "it has norm_before_fc and fc_norm, of which speculators takes one"
    return None


def speculators_config(source: Source) -> dict[str, Any]:
    """Return config.json; every flag is written, for vLLM takes an absent norm_before_residual for true."""
    contract, graph, target = source.contract, source.graph, source.target
    layer = decoder_config(contract, target, graph["hidden_size"])
    if graph.get("qk_norm"):
        layer["model_type"] = "qwen3"
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": graph["ttt_steps"],
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": FORMAT,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": source.target_path, "architectures": [type(target.model).__name__]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": graph["draft_vocab_size"],
        "target_hidden_size": None,
        # hidden_states indices, in speculators and in vLLM's reader of it alike.
        AUX_LAYERS_KEY: list(contract.tap_indices),
        **{flag: graph.get(flag, False) for flag in FLAGS},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": EXPORT_DTYPE,
    }


def speculators_name(name: str) -> str:
    """The layer is `layers.0`."""
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def write_speculators(source: Source, folder: Path) -> None:
    """Write config.json and model.safetensors; embed_tokens is always there, for absent it is loaded as zeros."""
    save_config(folder, speculators_config(source))
    tensors = {"embed_tokens.weight": source.embedding} | eagle3_tensors(source)
    save_weights(folder, {speculators_name(name): tensor for name, tensor in tensors.items()})
