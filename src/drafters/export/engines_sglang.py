"""SGLang 0.5.23's rules: srt/models/llama_eagle3.py, llama_eagle.py, model_loader/loader.py,
model_runner_components/spec_aux_hidden_state.py, speculative/eagle_worker_v2.py."""

from __future__ import annotations

import shlex
from dataclasses import replace

from drafters.export.engine_graphs import (
    AUX_LAYERS,
    WIDE,
    Folder,
    Rule,
    Ruling,
    Served,
    default_taps,
    eagle3_parameters,
    eagle_parameters,
    misfits,
    model_problems,
    size_problems,
    stray_problem,
    tap_problem,
)

SGLANG_CONFIG = "config.sglang.json"
SGLANG_EAGLE3, SGLANG_EAGLE = "LlamaForCausalLMEagle3", "LlamaForCausalLMEagle"


def _sglang_command(folder: Folder, served: Served, algorithm: str) -> str:
    # A chain, one token more than its steps: the token that the target has just said.
    sizes = f"--speculative-num-steps {served.steps} --speculative-eagle-topk 1"
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(served.name)} --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {shlex.quote(str(folder.path))} {sizes} "
        f"--speculative-num-draft-tokens {served.steps + 1}"
    )


def _sglang_eagle3(folder: Folder, served: Served) -> Ruling:
    config, notes = folder.config if folder.sglang is None else folder.sglang, []
    command, nested = _sglang_command(folder, served, "EAGLE3"), config.get("eagle_config") or {}
    if folder.sglang is not None:
        other, there = folder.path.with_name(f"{folder.path.name}-sglang"), shlex.quote(str(folder.path))
        copy = (
            f"cp -r {there} {shlex.quote(str(other))} && mv {shlex.quote(str(other))}/{{{SGLANG_CONFIG},config.json}}"
        )
        command = f"{copy} && {_sglang_command(replace(folder, path=other), served, 'EAGLE3')}"
        notes.append(f"with {SGLANG_CONFIG} in place of config.json, whose layer ids SGLang would count otherwise")
    if config["architectures"][0] != SGLANG_EAGLE3:
        return [f"architectures is {config['architectures'][0]}, SGLang knows {SGLANG_EAGLE3} alone"], notes, None
    problems = size_problems(config, served)
    if config["tie_word_embeddings"]:
        problems.append("tie_word_embeddings is true: SGLang takes the embedding for the output head")
    if "draft_vocab_size" not in config:
        return ["draft_vocab_size is missing, which SGLang reads"], notes, None
    if config.get("norm_before_residual"):
        problems.append("norm_before_residual: SGLang has no such graph and computes another")
    ids = nested.get(AUX_LAYERS)
    count = config.get("num_aux_hidden_states") or (len(ids) if ids else 3)
    graph = {**config, "norm_before_fc": nested.get("norm_before_fc", config.get("norm_before_fc", False))}
    expected = eagle3_parameters(
        graph, count, qkv_bias=False, o_bias=bool(config.get("attention_bias")), fc_bias=bool(config.get("bias"))
    )
    found = {name.replace("midlayer", "layers.0"): shape for name, shape in folder.shapes.items() if "t2d" not in name}
    if config["draft_vocab_size"] != served.vocab_size:
        expected["d2t"] = (config["draft_vocab_size"],)
    elif "d2t" in found:
        del found["d2t"]  # all zeros, and read as such
    borrowed = ["embed_tokens.weight"] if config["hidden_size"] == served.hidden_size else []
    problems += misfits(found, expected, "SGLang", borrowed=borrowed, drops=True)
    if served.own_embedding and config["hidden_size"] == served.hidden_size:
        problems.append("SGLang puts the target's embedding in place of the drafter's own")
    taken = tuple(index + 1 for index in ids) if ids else default_taps(served)
    notes += stray_problem(folder, "SGLang")
    return problems + tap_problem("SGLang", taken, served), notes, command


def _sglang_eagle(folder: Folder, served: Served) -> Ruling:
    config = folder.config
    if config["architectures"][0] != SGLANG_EAGLE:
        return [f"architectures is {config['architectures'][0]}, SGLang knows {SGLANG_EAGLE} alone"], [], None
    problems = size_problems({**config, "target_hidden_size": config["hidden_size"]}, served)
    expected = eagle_parameters(config, fc_bias=True, attention_bias=bool(config.get("attention_bias")))
    problems += misfits(folder.shapes, expected, "SGLang", borrowed=["embed_tokens.weight"], drops=True)
    if served.own_embedding:
        problems.append("SGLang puts the target's embedding in place of the drafter's own")
    return problems, [WIDE, *stray_problem(folder, "SGLang")], _sglang_command(folder, served, "EAGLE")


def _sglang_small(folder: Folder, served: Served) -> Ruling:
    problems = model_problems(folder, served, "SGLang", drops=True)
    return problems, stray_problem(folder, "SGLang"), _sglang_command(folder, served, "STANDALONE")


def _sglang_merged(folder: Folder, served: Served) -> Ruling:
    note = "it is served as the tuned target alone: SGLang passes over medusa_head.*, and nothing drafts"
    return [], [note], f"python -m sglang.launch_server --model-path {shlex.quote(str(folder.path))}"


SGLANG: dict[str, Rule] = {
    "eagle3": _sglang_eagle3,
    "speculators": _sglang_eagle3,
    "eagle-vllm": _sglang_eagle,
    "eagle-sglang": _sglang_eagle,
    "small": _sglang_small,
    "medusa2-merged": _sglang_merged,
}
