"""vLLM 0.33.0's rules: config/speculative.py, transformers_utils/configs (eagle, speculators), model_executor/models
(llama_eagle3, llama_eagle, utils), model_loader/default_loader.py; and 0.32's of Medusa, which 0.33 has no more."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafters.export.engine_graphs import (
    AUX_LAYERS,
    WIDE,
    Folder,
    Rule,
    Ruling,
    Served,
    Shapes,
    default_taps,
    eagle3_parameters,
    eagle_parameters,
    misfits,
    model_problems,
    size_problems,
    stray_problem,
    tap_problem,
)

# Of vLLM 0.33.0's registry, those that a Llama drafter can be registered as, and the class behind each.
VLLM_EAGLE3 = {
    name: "llama" for name in ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3", "PeagleLlamaForCausalLM")
} | {"Eagle3Qwen3ForCausalLM": "qwen3"}
VLLM_EAGLE = ("EagleLlamaForCausalLM",)
SPECULATORS_ARCHITECTURES = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
# Parts of a path that vLLM takes for a method, in this order, whatever else but these methods was asked for.
VLLM_PATHS = (("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark"))


def _vllm_command(folder: Folder, served: Served, method: str) -> str:
    speculative = {"method": method, "model": str(folder.path), "num_speculative_tokens": served.steps}
    return f"vllm serve {shlex.quote(served.name)} --speculative-config {shlex.quote(json.dumps(speculative))}"


def _vllm_eagle3(folder: Folder, served: Served) -> Ruling:
    config = folder.config
    architecture = config["architectures"][0]
    if not (architecture.startswith("Eagle3") or architecture.endswith("Eagle3")):
        architecture = f"Eagle3{architecture}"
    problems, notes = _vllm_eagle3_graph(folder, served, {**config, "architectures": [architecture]})
    if not any(part in str(folder.path).lower() for part in ("eagle3", "eagle-")):
        notes.append("the path does not tell vLLM the method: keep `method` in the command")
    return problems, notes, _vllm_command(folder, served, "eagle3")


def _vllm_eagle3_graph(folder: Folder, served: Served, config: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    architecture = config["architectures"][0]
    if architecture not in VLLM_EAGLE3:
        return [f"architectures becomes {architecture}, which vLLM does not know"], []
    qwen, nested = VLLM_EAGLE3[architecture] == "qwen3", config.get("eagle_config") or {}
    ids = config.get(AUX_LAYERS) or nested.get(AUX_LAYERS)
    # The Llama class takes fc's width from the nested list alone; the Qwen3 class from either.
    counted = ids if qwen else nested.get(AUX_LAYERS)
    count = config.get("num_aux_hidden_states") or (len(counted) if counted else 3)
    bias = bool(config.get("attention_bias"))
    graph = {**config, "norm_before_fc": nested.get("norm_before_fc", config.get("norm_before_fc", False))}
    o_bias = bias if qwen else bool(bias or config.get("bias"))
    expected = eagle3_parameters(graph, count, qkv_bias=bias, o_bias=o_bias, qk_norm=qwen)
    reduced = (config.get("draft_vocab_size") or config["vocab_size"]) != served.vocab_size
    if reduced:
        expected["d2t"] = (config["draft_vocab_size"],)
    found = {
        name.replace("midlayer.", "layers.0."): shape for name, shape in folder.shapes.items() if "t2d" not in name
    }
    borrowed = {"embed_tokens.weight"} if config["hidden_size"] == served.hidden_size else set()
    if not reduced and borrowed:
        borrowed.add("lm_head.weight")
    problems = size_problems(config, served) + stray_problem(folder, "vLLM")
    problems += misfits(found, expected, "vLLM", borrowed=borrowed, drops=False, drops_bias=True)
    return problems + tap_problem("vLLM", tuple(ids) if ids else default_taps(served), served), []


def _vllm_speculators(folder: Folder, served: Served) -> Ruling:
    config, inner = folder.config, folder.config["transformer_layer_config"]
    kind = config["speculators_model_type"]
    if kind != "eagle3":
        return [f"speculators_model_type is {kind!r}, these tensors are eagle3's"], [], None
    method = config["speculators_config"]["proposal_methods"][0]
    verifier = config["speculators_config"]["verifier"]["name_or_path"]
    model_type = inner.get("model_type", "llama")
    if model_type not in SPECULATORS_ARCHITECTURES:
        return [f"transformer_layer_config.model_type is {model_type!r}, vLLM takes llama or qwen3"], [], None
    flat = {
        **inner,
        "architectures": [SPECULATORS_ARCHITECTURES[model_type]],
        "draft_vocab_size": config.get("draft_vocab_size"),
        "norm_before_residual": config.get("norm_before_residual", True),
        **{flag: config.get(flag, False) for flag in ("norm_before_fc", "fc_norm", "norm_output")},
        **({AUX_LAYERS: config[AUX_LAYERS]} if config.get(AUX_LAYERS) else {}),
    }
    if config.get("target_hidden_size") is not None:
        flat["target_hidden_size"] = config["target_hidden_size"]
    problems, notes = _vllm_eagle3_graph(folder, served, flat)
    steps = method["speculative_tokens"]
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        problems.append(f"proposal_methods[0].speculative_tokens is {steps!r}, vLLM wants a positive number")
    if not verifier or not (Path(verifier).is_dir() or verifier.count("/") == 1):
        problems.append(
            f"verifier.name_or_path is {verifier!r}, neither a folder nor a hub id: vLLM loads it as target"
        )
    return problems, notes, f"vllm serve {shlex.quote(str(folder.path))}"


def _vllm_eagle(folder: Folder, served: Served) -> Ruling:
    config = folder.config
    architecture = config["architectures"][0]
    architecture = architecture if architecture.startswith("Eagle") else f"Eagle{architecture}"
    if architecture not in VLLM_EAGLE:
        return [f"architectures becomes {architecture}, which vLLM does not know"], [], None
    bias = bool(config.get("attention_bias") or config.get("bias"))
    expected = eagle_parameters(config, fc_bias=False, attention_bias=bias)
    problems = size_problems({**config, "target_hidden_size": config["hidden_size"]}, served) + stray_problem(
        folder, "vLLM"
    )
    problems += misfits(folder.shapes, expected, "vLLM", borrowed=["embed_tokens.weight"], drops=False, drops_bias=True)
    return problems, [WIDE], _vllm_command(folder, served, "eagle")


def _vllm_small(folder: Folder, served: Served) -> Ruling:
    problems = model_problems(folder, served, "vLLM", drops=False) + stray_problem(folder, "vLLM")
    path = str(folder.path).lower()
    taken = next((method for part, method in VLLM_PATHS if part in path), None)
    if taken is not None:
        problems.append(f"vLLM takes the path {folder.path} for method {taken}: rename the folder")
    return problems, [], _vllm_command(folder, served, "draft_model")


def _vllm_mtp(folder: Folder, served: Served) -> Ruling:
    kind = folder.config.get("model_type")
    return [f"model_type {kind!r} is none of the MTP models that vLLM has: their layers are not this one"], [], None


def _vllm_merged(folder: Folder, served: Served) -> Ruling:
    return ["vLLM refuses a model's file for tensors it does not know: medusa_head.*"], [], None


def _old_vllm_medusa(folder: Folder, served: Served) -> Ruling:
    config = folder.config
    layers, heads, size = (config[key] for key in ("num_hidden_layers", "num_heads", "hidden_size"))
    rows = config["truncated_vocab_size"]
    expected: Shapes = {}
    for head in range(heads):
        for place in range(layers):
            expected[f"blocks.{head}.layers.{place}.weight"] = (size, size)
            if config["medusa_fc_bias"]:
                expected[f"blocks.{head}.layers.{place}.bias"] = (size,)
        if not config["original_lm_head"]:
            expected[f"lm_heads.{head}.weight"] = (rows, size)
    expected |= {"lm_head.weight": (rows, size)} if config["original_lm_head"] else {}
    expected |= {"token_map": (rows,)} if rows < config["vocab_size"] else {}
    problems = misfits(folder.shapes, expected, "vLLM 0.32", drops=True) + stray_problem(folder, "vLLM")
    if (config["model_type"], config["architectures"]) != ("medusa", ["MedusaModel"]):
        problems.append(f"model_type and architectures are {config['model_type']!r}, {config['architectures']}")
    if (size, config["vocab_size"]) != (served.hidden_size, served.vocab_size):
        problems.append(f"hidden_size, vocab_size are not the target's {served.hidden_size}, {served.vocab_size}")
    return problems, [], _vllm_command(folder, replace(served, steps=heads), "medusa")


VLLM: dict[str, Rule] = {
    "eagle3": _vllm_eagle3,
    "speculators": _vllm_speculators,
    "eagle-vllm": _vllm_eagle,
    "eagle-sglang": _vllm_eagle,
    "medusa2-merged": _vllm_merged,
    "mtp-deepseek": _vllm_mtp,
    "mtp-qwen3next": _vllm_mtp,
    "small": _vllm_small,
}
OLD_VLLM: dict[str, Rule] = {"medusa-vllm": _old_vllm_medusa}
