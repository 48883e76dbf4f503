"""Each engine's rules: what it loads, why not, and the command that serves it."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drafters.errors import OutriderError
from drafters.export.engines import judge, open_folder
from drafters.export.expected import Native
from drafters.export.verify import served, weights_in
from tests.drafters.dialect_setup import FROM, checker, native, written
from tests.drafters.export_setup import SHAPE
from tests.drafters.export_setup import export as export_eagle3

# Which engines load which dialect of a sound drafter.
LOADS = {
    "eagle3": {"vllm", "sglang", "tensorrt-llm"},
    "speculators": {"vllm"},
    "eagle-vllm": {"vllm"},
    "eagle-sglang": {"sglang"},
    "medusa-v1": {"tgi"},
    "medusa-v2": {"tgi"},
    "medusa-vllm": {"vllm-0.32"},
    "mtp-deepseek": set(),
    "mtp-qwen3next": set(),
    "small": {"vllm", "sglang", "tensorrt-llm", "transformers"},
    "medusa2-merged": {"sglang", "transformers"},
}


@pytest.fixture(scope="module")
def sound(tiny_target, tmp_path_factory):
    """Every dialect's folder with what its target's side is."""
    place, made = tmp_path_factory.mktemp("engines"), {}
    sources: dict[str, Path] = {}

    def get(dialect: str):
        if dialect not in made:
            kind = FROM[dialect]
            if kind not in sources:
                sources[kind] = native(tiny_target, kind, place / "native" / kind)
            folder = written(tiny_target, sources[kind], dialect, place / dialect)
            made[dialect] = folder, served(checker(tiny_target, sources[kind], dialect).native)
        return made[dialect]

    return get


def verdicts(dialect: str, folder: Path, target_side):
    return judge(dialect, open_folder(folder, weights_in(dialect)), target_side)


@pytest.mark.parametrize("dialect", list(FROM))
def test_each_engine_loads_what_it_reads_and_says_why_not_otherwise(sound, dialect):
    folder, side = sound(dialect)
    found = verdicts(dialect, folder, side)
    assert {engine for engine, verdict in found.items() if verdict.loads} == LOADS[dialect], found
    for verdict in found.values():
        assert verdict.loads == (verdict.command is not None) and (verdict.loads or verdict.reasons)
        if verdict.loads:
            assert str(folder) in verdict.command


def test_commands_split_into_the_words_that_were_meant(sound):
    folder, side = sound("eagle3")
    side = replace(side, name="/models/it's here")
    found = verdicts("eagle3", folder, side)
    words = shlex.split(found["vllm"].command)
    assert words[:4] == ["vllm", "serve", "/models/it's here", "--speculative-config"]
    assert json.loads(words[4]) == {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3}
    words = shlex.split(found["sglang"].command)
    options = dict(zip(words[3::2], words[4::2]))
    assert options == {
        "--model-path": "/models/it's here",
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(folder),
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "4",
    }


Edit = Callable[[dict[str, Any]], Any]


def put(**values: Any) -> Edit:
    return lambda config: config.update(values)


def drop(*keys: str) -> Edit:
    return lambda config: [config.pop(key) for key in keys]


def inner(**values: Any) -> Edit:
    return lambda config: config["transformer_layer_config"].update(values)


CONFIG_RULES = [
    # dialect, engine, what is changed in config.json, what it says
    (
        "eagle3",
        "vllm",
        put(architectures=["EagleMambaForCausalLM"]),
        "becomes Eagle3EagleMambaForCausalLM, .* not know",
    ),
    ("eagle3", "sglang", put(architectures=["LlamaForCausalLM"]), "SGLang knows LlamaForCausalLMEagle3 alone"),
    (
        "eagle3",
        "vllm",
        put(eagle_aux_hidden_state_layer_ids=[3, 4, 5]),
        r"would tap hidden_states \[3, 4, 5\], trained",
    ),
    (
        "eagle3",
        "sglang",
        put(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}),
        r"tap .*\[3, 5, 6\], trained",
    ),
    # The nested list is raw in vLLM and one less in SGLang: one file cannot serve both.
    (
        "eagle3",
        "vllm",
        put(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}),
        r"tap .*\[1, 3, 4\], trained",
    ),
    ("eagle3", "vllm", put(norm_before_fc=True), "tensor input_norm.weight is missing, and vLLM leaves it"),
    ("eagle3", "sglang", put(norm_before_residual=True), "norm_before_residual: SGLang has no such graph"),
    ("eagle3", "tensorrt-llm", put(norm_before_residual=True), "norm_before_residual: TensorRT-LLM has no such graph"),
    ("eagle3", "vllm", put(fc_norm=False), "vLLM refuses the file for tensor fc_norm.0.weight"),
    ("eagle3", "sglang", put(fc_norm=False), "SGLang silently drops tensor fc_norm.0.weight"),
    ("eagle3", "vllm", put(head_dim=16), r"q_proj.weight is \[96, 128\], vLLM builds \[64, 128\]"),
    ("eagle3", "vllm", put(draft_vocab_size=512), r"lm_head.weight is \[128, 64\], vLLM builds \[512, 64\]"),
    ("eagle3", "vllm", put(draft_vocab_size=512), "vLLM refuses the file for tensor d2t"),
    ("eagle3", "sglang", drop("draft_vocab_size"), "draft_vocab_size is missing, which SGLang reads"),
    ("eagle3", "sglang", put(tie_word_embeddings=True), "takes the embedding for the output head"),
    ("eagle3", "vllm", put(attention_bias=True), "q_proj.bias is missing, and vLLM leaves it at random"),
    # vLLM's Llama layer takes `bias`, SGLang's name for that of fc, for that of o_proj.
    ("eagle3", "vllm", put(bias=True), "o_proj.bias is missing"),
    ("eagle3", "sglang", put(bias=True), "fc.bias is missing"),
    ("eagle3", "vllm", put(target_hidden_size=128), "target_hidden_size is 128, the target's 64"),
    ("eagle3", "vllm", put(vocab_size=500), "vocab_size is 500, the target's 512"),
    ("eagle3", "vllm", put(num_hidden_layers=2), "num_hidden_layers is 2, the file has one layer"),
    ("eagle3", "vllm", put(num_aux_hidden_states=4), r"fc.weight is \[64, 192\], vLLM builds \[64, 256\]"),
    ("eagle3", "vllm", put(hidden_size=None), "config.json cannot be read: TypeError"),
    ("eagle3", "vllm", drop("architectures"), "config.json cannot be read: KeyError 'architectures'"),
    ("speculators", "vllm", put(speculators_model_type="eagle"), "speculators_model_type is 'eagle'"),
    ("speculators", "vllm", inner(model_type="mistral"), "model_type is 'mistral', vLLM takes llama or qwen3"),
    ("speculators", "vllm", inner(model_type="qwen3"), "q_norm.weight is missing"),
    ("speculators", "vllm", drop("speculators_config"), "cannot be read: KeyError 'speculators_config'"),
    ("speculators", "vllm", put(eagle_aux_hidden_state_layer_ids=[1, 3, 4]), r"tap .*\[1, 3, 4\]"),
    ("eagle-vllm", "vllm", put(architectures=["Qwen2ForCausalLM"]), "becomes EagleQwen2ForCausalLM, .* not know"),
    ("eagle-vllm", "vllm", put(bias=True), "q_proj.bias is missing"),
    ("eagle-sglang", "sglang", put(architectures=["LlamaForCausalLM"]), "SGLang knows LlamaForCausalLMEagle alone"),
    ("medusa-v1", "tgi", put(architectures=["MedusaModel"]), "architectures is there: TGI then takes"),
    ("medusa-v2", "tgi", put(medusa_num_layers=2), "without output heads of its own TGI reads one block"),
    ("medusa-v2", "tgi", put(base_model_name_or_path="tiny"), "is 'tiny', neither a folder nor a hub id"),
    ("medusa-v1", "tgi", put(medusa_num_heads=3), "2.0.linear.bias is missing"),
    ("medusa-vllm", "vllm-0.32", put(medusa_fc_bias=False), "silently drops tensor blocks.0.layers.0.bias"),
    ("medusa-vllm", "vllm-0.32", put(original_lm_head=False), "lm_heads.0.weight is missing"),
    ("small", "vllm", put(vocab_size=500), "vocab_size is 500, the target's 512: they must be equal"),
    ("small", "transformers", put(num_hidden_layers=3), "model.layers.2.* is missing, and transformers leaves"),
]


@pytest.mark.parametrize(("dialect", "engine", "edit", "words"), CONFIG_RULES)
def test_an_engine_names_the_field_that_it_trips_over(sound, tmp_path, dialect, engine, edit, words):
    folder, side = sound(dialect)
    copied = Path(shutil.copytree(folder, tmp_path / dialect))
    config = json.loads((copied / "config.json").read_text())
    edit(config)
    (copied / "config.json").write_text(json.dumps(config))
    verdict = verdicts(dialect, copied, side)[engine]
    assert not verdict.loads and verdict.command is None
    with pytest.raises(OutriderError, match=words):
        raise OutriderError("; ".join(verdict.reasons))


def test_a_stray_safetensors_is_found_by_each_engine_where_no_index_forbids_it(sound, tmp_path):
    folder, side = sound("eagle3")
    copied = Path(shutil.copytree(folder, tmp_path / "copy"))
    save_file({"logits": torch.zeros(2)}, copied / "probe.safetensors")
    found = verdicts("eagle3", copied, side)
    assert "probe.safetensors; it refuses their tensors" in found["vllm"].reasons[0] and not found["vllm"].loads
    assert found["sglang"].loads and "passes over those it does not know" in found["sglang"].reasons[0]
    for dialect in ("eagle-sglang", "small"):
        other, its_side = sound(dialect)
        passed = Path(shutil.copytree(other, tmp_path / dialect))
        save_file({"logits": torch.zeros(2)}, passed / "probe.safetensors")
        (passed / "model.safetensors.index.json").unlink(missing_ok=True)
        verdict = verdicts(dialect, passed, its_side)["sglang"]
        assert verdict.loads and "passes over those it does not know" in verdict.reasons[-1], dialect
    names = open_folder(copied, "model.safetensors").shapes
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    assert verdicts("eagle3", copied, side)["vllm"].loads


def test_sglang_leaves_a_missing_bias_of_fc_at_random_values(sound, tmp_path):
    folder, side = sound("eagle-vllm")
    copied = Path(shutil.copytree(folder, tmp_path / "copy"))
    config = json.loads((copied / "config.json").read_text()) | {"architectures": ["LlamaForCausalLMEagle"]}
    (copied / "config.json").write_text(json.dumps(config))
    reasons = verdicts("eagle-sglang", copied, side)["sglang"].reasons
    assert reasons[0] == "tensor fc.bias is missing, and SGLang leaves it at random values"


def test_a_small_model_in_a_folder_that_vllm_takes_for_a_method_is_refused(sound, tmp_path):
    folder, side = sound("small")
    copied = Path(shutil.copytree(folder, tmp_path / "my-eagle-model"))
    reasons = verdicts("small", copied, side)["vllm"].reasons
    assert reasons and "for method eagle: rename the folder" in reasons[0]


def test_custom_taps_reach_sglang_by_its_own_config(tiny_target, tmp_path):
    """SGLang adds 1 to the ids it reads, vLLM takes them as they are: each gets its own file and both tap the same."""
    folder = export_eagle3(tiny_target, tmp_path / "native", SHAPE, (1, 3, 6))
    dialect = written(tiny_target, folder, "eagle3", tmp_path / "eagle3")
    side = served(Native.read(folder, tiny_target))
    found = verdicts("eagle3", dialect, side)
    assert found["vllm"].loads and found["sglang"].loads and found["tensorrt-llm"].loads
    assert "mv" in found["sglang"].command and f"{dialect}-sglang" in found["sglang"].command
    assert "eagle3_layers_to_capture: [0, 2, 5]" in found["tensorrt-llm"].command
    (dialect / "config.sglang.json").unlink()
    found = verdicts("eagle3", dialect, side)
    assert found["sglang"].reasons == ("SGLang would tap hidden_states [2, 4, 5], trained were [1, 3, 6]",)


def test_an_embedding_of_its_own_is_lost_where_an_engine_puts_the_targets_there(sound):
    folder, side = sound("eagle3")
    found = verdicts("eagle3", folder, replace(side, own_embedding=True))
    assert found["vllm"].loads and not found["sglang"].loads and not found["tensorrt-llm"].loads
    assert "puts the target's embedding in place of the drafter's own" in found["sglang"].reasons[0]
