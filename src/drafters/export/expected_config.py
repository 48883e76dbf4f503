"""What a dialect's config.json must say for one drafter, field by field."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from drafters.export.expected import Native, OneOf

Config = dict[str, Any]
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
# Fields that may differ, and why nothing an engine computes depends on them.
FREE: dict[str, dict[str, str]] = {
    "medusa2-merged": {"transformers_version": "says which version of a library wrote the file; no loader reads it"}
}


def expected_configs(dialect: str, native: Native) -> dict[str, Config]:
    """The JSON files that engines read, by name, as they would be read back; OneOf where several values will do."""
    configs = {"config.json": _CONFIGS[dialect](native)}
    if dialect == "eagle3" and AUX_LAYERS in configs["config.json"]:
        rest = {key: value for key, value in configs["config.json"].items() if key != AUX_LAYERS}
        nested = {AUX_LAYERS: [index - 1 for index in native.contract.tap_indices], "use_aux_hidden_state": True}
        configs["config.sglang.json"] = rest | {"eagle_config": nested}
    return configs


def differences(found: Any, expected: Any, where: str, free: dict[str, str]) -> list[str]:
    """Every place, by its path of keys, at which a parsed JSON value is not the expected one, in words."""
    if isinstance(expected, OneOf):
        return [] if found in expected else [f"{where} is {found!r}, expected {' or '.join(map(repr, expected))}"]
    if isinstance(expected, dict) and isinstance(found, dict):
        problems = []
        for key in sorted(set(found) | set(expected)):
            place = f"{where}: {key}" if where.endswith(".json") else f"{where}.{key}"
            if key in free:
                continue
            if key not in found:
                problems.append(f"{place} is missing, expected {expected[key]!r}")
            elif key not in expected:
                problems.append(f"{place} is {found[key]!r}, a field this dialect does not have")
            else:
                problems += differences(found[key], expected[key], place, {})
        return problems
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        pairs = zip(found, expected, strict=True)
        return [each for place, pair in enumerate(pairs) for each in differences(*pair, f"{where}[{place}]", {})]
    # 1 == True == 1.0 in Python, and not for a loader.
    return (
        [] if type(found) is type(expected) and found == expected else [f"{where} is {found!r}, expected {expected!r}"]
    )


def _decoder(native: Native, size: int) -> Config:
    graph, rope = native.graph, dict(native.contract.rope)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": size,
        "hidden_act": "silu",
        "num_attention_heads": graph["num_heads"],
        "num_key_value_heads": graph["num_kv_heads"],
        **{key: graph[key] for key in ("intermediate_size", "head_dim", "rms_norm_eps")},
        **{key: graph[key] for key in ("max_position_embeddings", "vocab_size")},
        "attention_bias": graph.get("attention_bias", False),
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling if scaling["rope_type"] != "default" else None,
        "rope_parameters": rope,
        "torch_dtype": "bfloat16",
        "bos_token_id": native.target.tokenizer.bos_token_id,
        "eos_token_id": native.target.tokenizer.eos_token_id,
    }


def _taps(native: Native) -> Config:
    count, taps = native.target.num_layers, list(native.contract.tap_indices)
    usual = count >= 6 and taps == [2, count // 2, count - 3]
    return {} if usual else {AUX_LAYERS: taps}


def _eagle3(native: Native) -> Config:
    graph, wide = native.graph, native.target.hidden_size
    flags = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "qk_norm")
    return {
        **_decoder(native, graph["hidden_size"]),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(native.tensors["d2t"]),
        **({"target_hidden_size": wide} if wide != graph["hidden_size"] else {}),
        **{flag: True for flag in flags if graph.get(flag)},
        **({"bias": True} if graph.get("fc_bias") else {}),
        **_taps(native),
    }


def _speculators(native: Native) -> Config:
    graph = native.graph
    method = {"proposal_type": "greedy", "speculative_tokens": graph["ttt_steps"], "verifier_accept_k": 1}
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    layer = _decoder(native, graph["hidden_size"]) | ({"model_type": "qwen3"} if graph.get("qk_norm") else {})
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method | {"accept_tolerance": 0.0}],
            "verifier": {"name_or_path": native.target_names, "architectures": [_architecture(native)]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": len(native.tensors["d2t"]),
        "target_hidden_size": None,
        AUX_LAYERS: list(native.contract.tap_indices),
        **{flag: graph.get(flag, False) for flag in flags},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _architecture(native: Native) -> str:
    return type(native.target.model).__name__


def _eagle_vllm(native: Native) -> Config:
    return _decoder(native, native.target.hidden_size) | {"architectures": ["LlamaForCausalLM"], "bias": False}


def _eagle_sglang(native: Native) -> Config:
    return _decoder(native, native.target.hidden_size) | {"architectures": ["LlamaForCausalLMEagle"], "bias": True}


def _medusa(native: Native) -> Config:
    graph = native.graph
    return {
        "medusa_num_heads": graph["num_heads"],
        "medusa_num_layers": graph["num_layers"],
        "base_model_name_or_path": native.target_names,
        **({} if graph["own_heads"] else {"version": "2"}),
    }


def _medusa_vllm(native: Native) -> Config:
    graph = native.graph
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": native.target.hidden_size,
        "vocab_size": native.target.vocab_size,
        "truncated_vocab_size": len(native.tensors["d2t"]),
        "num_heads": graph["num_heads"],
        "num_hidden_layers": graph["num_layers"],
        "max_paths": 64,
        "topk": 10,
        "medusa_fc_bias": True,
        "original_lm_head": not graph["own_heads"],
        "torch_dtype": "bfloat16",
    }


def _merged(native: Native) -> Config:
    own = {key: value for key, value in _medusa(native).items() if key != "base_model_name_or_path"}
    model = json.loads(native.target.model.config.to_json_string())
    return model | {"architectures": [_architecture(native)]} | own


def _mtp(native: Native) -> Config:
    return _decoder(native, native.target.hidden_size) | {
        "model_type": native.target.text_config.model_type,
        "num_hidden_layers": native.target.num_layers,
        "draft_vocab_size": native.target.vocab_size,
        "attention_bias": native.graph["qkv_bias"],
    }


def _mtp_deepseek(native: Native) -> Config:
    return _mtp(native) | {"architectures": [f"{_architecture(native)}NextN"], "num_nextn_predict_layers": 1}


def _mtp_qwen3next(native: Native) -> Config:
    return _mtp(native) | {"architectures": ["Qwen3NextMTP"], "mtp_num_hidden_layers": 1}


def _small(native: Native) -> Config:
    graph, target = native.graph, native.target
    own = graph["hidden_size"] != target.hidden_size
    return _decoder(native, graph["hidden_size"]) | {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": graph["num_layers"],
        "tie_word_embeddings": own or target.embed_weight.data_ptr() == target.head_weight.data_ptr(),
        "eos_token_id": list(target.eos_ids),
    }


_CONFIGS: dict[str, Callable[[Native], Config]] = {
    "eagle3": _eagle3,
    "speculators": _speculators,
    "eagle-vllm": _eagle_vllm,
    "eagle-sglang": _eagle_sglang,
    "medusa-v1": _medusa,
    "medusa-v2": _medusa,
    "medusa-vllm": _medusa_vllm,
    "medusa2-merged": _merged,
    "mtp-deepseek": _mtp_deepseek,
    "mtp-qwen3next": _mtp_qwen3next,
    "small": _small,
}
