"""What each serving engine does with a folder, by its own loader's rules over config.json and the tensors' headers.

Beside vLLM and SGLang: TGI (layers/medusa.py, layers/speculative.py, models/__init__.py), TensorRT-LLM
(_torch/models/modeling_speculative.py, llmapi/llm_args.py), transformers (assistant_model), llama.cpp.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from drafters.contract import INDEX_NAME, listed_weights
from drafters.export.engine_graphs import (
    Folder,
    Rule,
    Ruling,
    Served,
    Shapes,
    eagle3_parameters,
    medusa_parameters,
    misfits,
    model_problems,
    size_problems,
)
from drafters.export.engines_sglang import SGLANG, SGLANG_CONFIG
from drafters.export.engines_vllm import OLD_VLLM, VLLM

MEDUSA_FILE = "medusa_lm_head.safetensors"


@dataclass(frozen=True)
class Verdict:
    """Whether an engine loads the folder and computes the trained graph; what stands against it or beside it; the
    exact command where it loads."""

    loads: bool
    reasons: tuple[str, ...]
    command: str | None

    def to_json(self) -> dict[str, Any]:
        """Return a dict of JSON values."""
        return {"loads": self.loads, "reasons": list(self.reasons), "command": self.command}


def read_shapes(path: Path) -> Shapes:
    """Shapes of a safetensors file's tensors, from its header; SafetensorError where it is none."""
    with safe_open(path, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}


def open_folder(path: Path, weights: str) -> Folder:
    """Look at a folder whose tensors are in the file `weights`, or in the shards that an index beside it lists."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    beside = path / SGLANG_CONFIG
    sglang = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else None
    present, listed = {each.name for each in path.glob("*.safetensors")}, listed_weights(path, weights)
    shapes: Shapes = {}
    for name in listed:
        shapes |= read_shapes(path / name)
    strays = () if (path / INDEX_NAME).is_file() else tuple(sorted(present - set(listed)))
    return Folder(path, config, shapes, strays, sglang)


def judge(dialect: str, folder: Folder, served: Served) -> dict[str, Verdict]:
    """Each engine's verdict on a folder of this dialect; a config.json that a rule cannot read is a reason."""
    verdicts = {}
    for engine, rules in _RULES.items():
        rule = rules.get(dialect)
        if rule is None:
            verdicts[engine] = Verdict(False, (_ABSENT[engine],), None)
            continue
        try:
            problems, notes, command = rule(folder, served)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            problems, notes, command = [f"config.json cannot be read: {type(error).__name__} {error}"], [], None
        verdicts[engine] = Verdict(not problems, (*problems, *notes), None if problems else command)
    return verdicts


# ---- TGI


def _tgi_medusa(folder: Folder, served: Served) -> Ruling:
    config = folder.config
    layers, heads, base = (config[key] for key in ("medusa_num_layers", "medusa_num_heads", "base_model_name_or_path"))
    if "architectures" in config:
        return ["architectures is there: TGI then takes the folder for no Medusa at all"], [], None
    own = f"0.{layers}.weight" in folder.shapes
    problems = []
    if not (Path(base).is_dir() or base.count("/") == 1):
        problems.append(
            f"base_model_name_or_path is {base!r}, neither a folder nor a hub id: TGI loads it as the target"
        )
    if not own and layers != 1:
        problems.append(f"medusa_num_layers is {layers}: without output heads of its own TGI reads one block a head")
    if not (folder.path / MEDUSA_FILE).is_file():
        problems.append(f"{MEDUSA_FILE} is missing, the only file that TGI reads")
    rows = served.vocab_size if own else None
    expected = medusa_parameters(layers, heads, served.hidden_size, rows)
    problems += misfits(folder.shapes, expected, "TGI", drops=True)
    # TGI says more than 128 tokens at once without drafts.
    return problems, [], f"text-generation-launcher --model-id {shlex.quote(str(folder.path))} --speculate {heads}"


# ---- TensorRT-LLM


def _tensorrt_command(folder: Folder, served: Served, kind: str, *more: str) -> str:
    lines = [
        "speculative_config:",
        f"  decoding_type: {kind}",
        f"  max_draft_len: {served.steps}",
        f"  speculative_model_dir: {folder.path}",
        *more,
    ]
    text = "\\n".join(lines).replace("'", "'\\''")
    return (
        f"printf '{text}\\n' > speculative.yaml && "
        f"trtllm-serve {shlex.quote(served.name)} --extra_llm_api_options speculative.yaml"
    )


def _tensorrt_eagle3(folder: Folder, served: Served) -> Ruling:
    config, nested = folder.config, folder.config.get("eagle_config") or {}
    problems = size_problems(config, served)
    if config.get("norm_before_residual"):
        problems.append("norm_before_residual: TensorRT-LLM has no such graph and computes another")
    if config.get("norm_before_fc") and not nested.get("norm_before_fc"):
        problems.append("norm_before_fc is read from eagle_config alone")
    if sorted(served.taps) != list(served.taps):
        problems.append(f"its taps are a set, in ascending order: {list(served.taps)} cannot be said")
    bias = config["attention_bias"]
    graph = {**config, "norm_before_fc": nested.get("norm_before_fc", False)}
    expected = eagle3_parameters(
        graph, len(served.taps), qkv_bias=bias, o_bias=bias, fc_bias=bool(config.get("bias", False))
    )
    if config["draft_vocab_size"] != config["vocab_size"]:
        expected["d2t"] = (config["draft_vocab_size"],)
    found = {name.replace("midlayer.", "layers.0."): shape for name, shape in folder.shapes.items() if name != "t2d"}
    shared = config.get("target_hidden_size", config["hidden_size"]) == config["hidden_size"]
    if shared:
        found.pop("embed_tokens.weight", None)
        del expected["embed_tokens.weight"]
        if served.own_embedding:
            problems.append("TensorRT-LLM puts the target's embedding in place of the drafter's own")
    problems += misfits(found, expected, "TensorRT-LLM", borrowed=["lm_head.weight"], drops=True)
    taps = f"  eagle3_layers_to_capture: {[index - 1 for index in served.taps]}"
    note = "by its public source; layer ids are given in the command, config.json's are not read"
    return problems, [note], _tensorrt_command(folder, served, "Eagle", taps)


def _tensorrt_small(folder: Folder, served: Served) -> Ruling:
    problems = model_problems(folder, served, "TensorRT-LLM", drops=True)
    return problems, ["by its public source"], _tensorrt_command(folder, served, "DraftTarget")


# ---- transformers


def _generate(model: str, assistant: str | None) -> str:
    lines = [
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T",
        f"t, m = T.from_pretrained({model!r}), M.from_pretrained({model!r})",
        "a = " + (f"M.from_pretrained({assistant!r})" if assistant else "None"),
        "o = m.generate(**t('Hello', return_tensors='pt'), assistant_model=a, max_new_tokens=64)",
        "print(t.decode(o[0]))",
    ]
    return f"python -c {shlex.quote('; '.join(lines))}"


def _transformers_small(folder: Folder, served: Served) -> Ruling:
    problems = model_problems(folder, served, "transformers", drops=True)
    return problems, [], _generate(served.name, str(folder.path))


def _transformers_merged(folder: Folder, served: Served) -> Ruling:
    note = "it is the tuned target alone: transformers passes over medusa_head.*, and nothing drafts"
    return [], [note], _generate(str(folder.path), None)


_ABSENT = {
    "vllm": "vLLM 0.33 has no such method (it had Medusa until 0.32)",
    "vllm-0.32": "for this format the current vLLM stands for older ones",
    "sglang": "SGLang has no such method",
    "tgi": "TGI drafts with Medusa heads alone",
    "tensorrt-llm": "TensorRT-LLM's PyTorch backend has no such method",
    "transformers": "transformers drafts with whole models alone",
    "llama.cpp": "llama.cpp reads GGUF alone: export.dialect=gguf",
}
_RULES: dict[str, dict[str, Rule]] = {
    "vllm": VLLM,
    "vllm-0.32": OLD_VLLM,
    "sglang": SGLANG,
    "tgi": {"medusa-v1": _tgi_medusa, "medusa-v2": _tgi_medusa},
    "tensorrt-llm": {"eagle3": _tensorrt_eagle3, "small": _tensorrt_small},
    "transformers": {"small": _transformers_small, "medusa2-merged": _transformers_merged},
    "llama.cpp": {},
}
ENGINES = tuple(_RULES)
