"""The rules of export/engines*.py against vLLM's and SGLang's own code: what of it runs without a GPU is run, the rest
is read. `pip install --no-deps vllm==0.33.0 sglang==0.5.23` is enough for both."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from drafters.export.engines import judge, open_folder
from drafters.export.engines_sglang import SGLANG_EAGLE, SGLANG_EAGLE3
from drafters.export.engines_vllm import SPECULATORS_ARCHITECTURES, VLLM_EAGLE, VLLM_EAGLE3
from drafters.export.expected import Native
from drafters.export.verify import served, weights_in
from tests.drafters.dialect_setup import FROM, native, written

pytestmark = pytest.mark.oracle


def source(package: str, path: str) -> Path:
    """A file of an installed engine, which is not imported; skips where it is not installed."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed: pip install --no-deps vllm==0.33.0 sglang==0.5.23")
    return Path(found.submodule_search_locations[0]) / path


def tree(package: str, path: str) -> ast.Module:
    return ast.parse(source(package, path).read_text(encoding="utf-8"))


def function(package: str, path: str, name: str) -> Callable[..., Any]:
    """One function of an engine, which needs nothing of the module around it but these."""
    module = tree(package, path)
    found = next(node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name)
    names = {"os": os, "json": json, "List": list, "Optional": Any | None}
    exec(compile(ast.Module([found], []), path, "exec"), names)
    return names[name]


def literals(module: ast.Module, name: str) -> set[str]:
    """The strings of a Literal[...], those of other Literals that it names included."""
    value = next(
        node.value
        for node in module.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name
    )
    parts = value.slice.elts if isinstance(value.slice, ast.Tuple) else [value.slice]
    return {
        each
        for part in parts
        for each in ([part.value] if isinstance(part, ast.Constant) else literals(module, part.id))
    }


def fields(module: ast.Module, name: str) -> dict[str, ast.AnnAssign]:
    found = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.target.id: node for node in found.body if isinstance(node, ast.AnnAssign)}


@pytest.fixture(scope="module")
def commands(tiny_target, tmp_path_factory):
    """A folder of each dialect that vLLM or SGLang loads, and the commands that are printed for it."""
    place, made = tmp_path_factory.mktemp("commands"), {}
    for dialect in ("eagle3", "speculators", "eagle-vllm", "eagle-sglang", "small"):
        origin = place / "native" / FROM[dialect]
        if not origin.exists():
            native(tiny_target, FROM[dialect], origin)
        folder = written(tiny_target, origin, dialect, place / dialect)
        side = served(Native.read(origin, tiny_target))
        found = judge(dialect, open_folder(folder, weights_in(dialect)), side)
        made[dialect] = folder, {engine: verdict.command for engine, verdict in found.items() if verdict.loads}
    return made


# ---- vLLM


def registered() -> set[str]:
    module = tree("vllm", "model_executor/models/registry.py")
    table = next(
        node.value
        for node in module.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "_SPECULATIVE_DECODING_MODELS"
    )
    return {key.value for key in table.keys if isinstance(key, ast.Constant)}


def test_vllm_knows_the_architectures_that_the_rules_accept():
    known = registered()
    assert set(VLLM_EAGLE3) | set(VLLM_EAGLE) | set(SPECULATORS_ARCHITECTURES.values()) <= known
    assert not {"EagleQwen2ForCausalLM", "LlamaForCausalLMNextN", "MedusaModel", "Eagle3DraftModel"} & known


@pytest.mark.parametrize(("dialect", "method"), [("eagle3", "eagle3"), ("eagle-vllm", "eagle")])
def test_vllms_own_config_makes_a_registered_architecture(commands, dialect, method):
    source("vllm", "__init__.py")
    configs = pytest.importorskip("vllm.transformers_utils.configs.eagle", exc_type=ImportError)
    folder, printed = commands[dialect]
    config = configs.EAGLEConfig(AutoConfig.from_pretrained(folder), method=method, model_type="eagle")
    assert config.architectures[0] in registered() and "vllm" in printed
    assert config.hidden_size == 64 and config.num_hidden_layers == 1
    assert method == "eagle" or (config.draft_vocab_size == 128 and config.fc_norm is True)


def test_vllms_own_reader_takes_the_speculators_folder(commands):
    source("vllm", "__init__.py")
    module = pytest.importorskip("vllm.transformers_utils.configs.speculators.base", exc_type=ImportError)
    folder, printed = commands["speculators"]
    raw = json.loads((folder / "config.json").read_text())
    found = module.SpeculatorsConfig.extract_vllm_speculative_config(raw)
    assert found == {"method": "eagle3", "num_speculative_tokens": 3}
    config = module.SpeculatorsConfig.from_pretrained(folder)
    assert config.architectures == ["Eagle3LlamaForCausalLM"] and config.eagle_aux_hidden_state_layer_ids == [2, 4, 5]
    flags = (config.norm_before_residual, config.norm_before_fc, config.fc_norm, config.norm_output)
    assert flags == (False, False, True, False) and config.draft_vocab_size == 128
    assert printed == {"vllm": f"vllm serve {folder}"}


@pytest.mark.parametrize("dialect", ["eagle3", "eagle-vllm", "small"])
def test_vllm_parses_the_printed_command(commands, dialect):
    _, printed = commands[dialect]
    words = shlex.split(printed["vllm"])
    assert words[:2] == ["vllm", "serve"] and words[3] in source("vllm", "engine/arg_utils.py").read_text()
    module = tree("vllm", "config/speculative.py")
    asked = json.loads(words[4])
    assert set(asked) <= set(fields(module, "SpeculativeConfig"))
    assert asked["method"] in literals(module, "SpeculativeMethod")


# ---- SGLang


def test_sglang_has_the_classes_that_the_rules_accept():
    for path, name in (("llama_eagle3.py", SGLANG_EAGLE3), ("llama_eagle.py", SGLANG_EAGLE)):
        assert f"EntryClass = [{name}]" in source("sglang", f"srt/models/{path}").read_text()


@pytest.mark.parametrize("dialect", ["eagle3", "eagle-sglang", "small"])
def test_sglang_parses_the_printed_command(commands, dialect):
    _, printed = commands[dialect]
    words = shlex.split(printed["sglang"])
    options = dict(zip(words[3::2], words[4::2]))
    known = fields(tree("sglang", "srt/arg_groups/fields/spec.py"), "Spec")
    known |= fields(tree("sglang", "srt/arg_groups/fields/model.py"), "Model")
    for option, value in options.items():
        field = known[option.removeprefix("--").replace("-", "_")]
        said = ast.unparse(field.annotation)
        assert "no_cli=True" not in said
        assert "[int]" not in said or value.isdigit()
    algorithms = source("sglang", "srt/speculative/spec_info.py").read_text()
    assert f"{options['--speculative-algorithm']} = auto()" in algorithms


# ---- which files of a folder are read


@pytest.mark.parametrize(
    ("package", "path"),
    [
        ("vllm", "model_executor/model_loader/weight_utils.py"),
        ("sglang", "srt/model_loader/weight_utils.py"),
    ],
)
def test_a_stray_file_is_read_unless_an_index_leaves_it_out(tmp_path, package, path):
    keep = function(package, path, "filter_duplicate_safetensors_files")
    files = [str(tmp_path / name) for name in ("model.safetensors", "probe.safetensors")]
    for file in files:
        Path(file).write_bytes(b"")
    index = "model.safetensors.index.json"
    assert keep(list(files), str(tmp_path), index) == files
    (tmp_path / index).write_text(json.dumps({"weight_map": {"fc.weight": "model.safetensors"}}))
    assert keep(list(files), str(tmp_path), index) == files[:1]
