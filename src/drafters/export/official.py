"""EAGLE-3 in the official names, readable by vLLM and SGLang (names: EAGLE eagle/model/cnets.py)."""

from __future__ import annotations

from typing import Any

from drafters.contract import Contract
from drafters.target import Target, default_taps

EXPORT_DTYPE = "bfloat16"
CONFIG_NAME = "config.json"
SGLANG_CONFIG_NAME = "config.sglang.json"
AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"


def decoder_config(contract: Contract, target: Target, hidden_size: int) -> dict[str, Any]:
    """Return what config.json says of a Llama of one layer, all but its architecture."""
    graph, theta = contract.graph, contract.rope["rope_theta"]
    scaling = {key: value for key, value in contract.rope.items() if key != "rope_theta"}
    return {
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": graph["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": graph["num_heads"],
        "num_key_value_heads": graph["num_kv_heads"],
        "head_dim": graph["head_dim"],
        "hidden_act": "silu",
        "rms_norm_eps": graph["rms_norm_eps"],
        "max_position_embeddings": graph["max_position_embeddings"],
        "vocab_size": graph["vocab_size"],
        "tie_word_embeddings": False,
        "attention_bias": graph.get("attention_bias", False),
        "mlp_bias": False,
        "rope_theta": theta,
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        "rope_parameters": dict(contract.rope),
        "torch_dtype": EXPORT_DTYPE,
        "bos_token_id": target.tokenizer.bos_token_id,
        "eos_token_id": target.tokenizer.eos_token_id,
    }


def official_config(contract: Contract, target: Target) -> dict[str, Any]:
    """Return config.json for vLLM and SGLang; flags appear only when set, tap ids only when not the default.

    vLLM takes the ids as they are and SGLang adds 1, so they are left out when both would choose them anyway.
    """
    graph = contract.graph
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": graph["draft_vocab_size"]}
    config |= decoder_config(contract, target, graph["hidden_size"])
    if graph["target_hidden_size"] != graph["hidden_size"]:
        config["target_hidden_size"] = graph["target_hidden_size"]
    for flag in ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "qk_norm"):
        if graph.get(flag):
            config[flag] = True
    if graph.get("fc_bias"):
        config["bias"] = True  # SGLang's name
    if not _taps_are_default(contract, target):
        config[AUX_LAYERS_KEY] = list(contract.tap_indices)
    return config


def _taps_are_default(contract: Contract, target: Target) -> bool:
    return target.num_layers >= 6 and contract.tap_indices == default_taps(target.num_layers)


def official_configs(contract: Contract, target: Target) -> dict[str, dict[str, Any]]:
    """Return config.json and, for custom taps only, the same in SGLang's counting."""
    config = official_config(contract, target)
    configs = {CONFIG_NAME: config}
    if AUX_LAYERS_KEY in config:
        # SGLang reads the nested list and adds 1; vLLM reads a nested list raw: one file cannot serve both.
        nested = {AUX_LAYERS_KEY: [index - 1 for index in contract.tap_indices], "use_aux_hidden_state": True}
        rest = {key: value for key, value in config.items() if key != AUX_LAYERS_KEY}
        configs[SGLANG_CONFIG_NAME] = rest | {"eagle_config": nested}
    return configs
