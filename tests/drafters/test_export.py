"""An export loads back bit for bit, in the official layout, and its card claims only what was measured."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from drafters.config import TargetConfig
from drafters.contract import make_contract, read_contract
from drafters.errors import ArtifactError, ContractError
from drafters.export import export_drafter, load_drafter
from drafters.export import native as native_module
from drafters.export.card import model_card
from drafters.export.official import official_config
from drafters.target import Target, default_taps
from tests.drafters.export_setup import (
    DATA,
    OFFICIAL_NAMES,
    SHAPE,
    TAPS,
    build_drafter,
    describe,
    export,
    reseal,
)

REPORT = {
    "acceptance_length": 2.345,
    "acceptance_at": [0.75, 0.4321],
    "rounds": 100,
    "drafted": 1500,
    "accepted": 134,
    "emitted": 234,
    "tokens_per_s": 50.5,
    "plain_tokens_per_s": 40.0,
    "transformers_tokens_per_s": None,
    "speedup": 1.2625,
    "speedup_vs_transformers": None,
    "identical": 39,
    "prompts": 40,
    "near_ties": 1,
    "dtype": "bfloat16",
    "temperature": 0.0,
    "command": "python serve.py drafter.path=X",
}


@pytest.fixture
def folder(exported, tmp_path) -> Path:
    """A private copy of the export, free to be damaged."""
    return Path(shutil.copytree(exported, tmp_path / "copy"))


def test_round_trip_is_bit_equal_and_computes_the_same(tiny_target, exported):
    drafter, contract = load_drafter(exported, tiny_target)
    original = build_drafter(tiny_target)
    assert contract == describe(original, tiny_target) == read_contract(exported)
    assert drafter.shape == SHAPE and not drafter.training
    expected = original.to(torch.bfloat16).state_dict()
    loaded = drafter.state_dict()
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor.to(loaded[name].dtype)), name
    assert drafter.fc.weight.dtype == torch.float32
    assert drafter.embedding.data_ptr() == tiny_target.embed_weight.data_ptr()


def test_names_shapes_and_dtypes_are_the_official_ones(exported):
    tensors = load_file(exported / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == OFFICIAL_NAMES
    integer = {"d2t": torch.int64, "t2d": torch.bool}
    assert {tensor.dtype for name, tensor in tensors.items() if name not in integer} == {torch.bfloat16}
    assert {name: tensors[name].dtype for name in integer} == integer
    kept = torch.arange(128) + tensors["d2t"]
    assert torch.equal(kept, tensors["t2d"].nonzero().flatten()) and bool((tensors["d2t"].diff() >= 0).all())


def test_config_is_what_the_engines_read(exported):
    config = json.loads((exported / "config.json").read_text())
    assert config == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "vocab_size": 512,
        "draft_vocab_size": 128,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": 2,
    }
    read = AutoConfig.from_pretrained(exported)
    assert read.rope_parameters == config["rope_parameters"] and read.dtype == torch.bfloat16
    assert (read.head_dim, read.draft_vocab_size, read.num_hidden_layers) == (24, 128, 1)
    assert not (exported / "config.sglang.json").exists()


@pytest.mark.parametrize(("fc_norm", "norm_output"), [(False, False), (True, False), (False, True), (True, True)])
def test_each_flag_of_eagle_3_1_is_written_and_decides_the_graph(tiny_target, tmp_path, fc_norm, norm_output):
    shape = dataclasses.replace(SHAPE, fc_norm=fc_norm, norm_output=norm_output)
    folder = export(tiny_target, tmp_path / "export", shape)
    config = json.loads((folder / "config.json").read_text())
    assert {flag for flag in ("fc_norm", "norm_output") if config.get(flag)} == {
        flag for flag in ("fc_norm", "norm_output") if getattr(shape, flag)
    }
    drafter, contract = load_drafter(folder, tiny_target)
    assert (contract.graph["fc_norm"], contract.graph["norm_output"]) == (fc_norm, norm_output)
    taps, out = torch.randn(4, 192), torch.randn(4, 64)
    parts = [drafter.fc_norm[i](part) for i, part in enumerate(taps.split(64, -1))] if fc_norm else [taps]
    torch.testing.assert_close(drafter.fuse(taps), drafter.fc(torch.cat(parts, -1)))
    assert drafter.feedback(out).equal(drafter.norm(out) if norm_output else out)
    for flag in ("fc_norm", "norm_output"):
        (folder / "config.json").write_text(json.dumps({**config, flag: not getattr(shape, flag)}))
        reseal(folder)
        with pytest.raises(ContractError, match=f"{flag} is {not getattr(shape, flag)}"):
            load_drafter(folder, tiny_target)


def test_flags_and_custom_taps_are_written_and_read_back(tiny_target, tmp_path):
    shape = dataclasses.replace(SHAPE, fc_norm=True, norm_output=True, num_taps=2)
    folder = export(tiny_target, tmp_path / "custom", shape, (3, 7))
    config = json.loads((folder / "config.json").read_text())
    assert config["fc_norm"] is True and config["norm_output"] is True
    assert config["eagle_aux_hidden_state_layer_ids"] == [3, 7] and "eagle_config" not in config
    sglang = json.loads((folder / "config.sglang.json").read_text())
    nested = {"eagle_aux_hidden_state_layer_ids": [2, 6], "use_aux_hidden_state": True}
    assert sglang.pop("eagle_config") == nested
    del config["eagle_aux_hidden_state_layer_ids"]
    assert sglang == config
    assert {"fc_norm.0.weight", "fc_norm.1.weight"} <= load_file(folder / "model.safetensors").keys()
    drafter, contract = load_drafter(folder, tiny_target)
    assert drafter.shape == shape and contract.tap_indices == (3, 7)


def test_target_hidden_size_is_written_only_when_it_differs(tiny_target):
    graph = dataclasses.asdict(dataclasses.replace(SHAPE, hidden_size=32)) | {"ttt_steps": 3}
    rope = {"rope_type": "default", "rope_theta": graph.pop("rope_theta")}
    contract = make_contract(
        tiny_target,
        family="eagle3",
        graph=graph,
        tap_indices=TAPS,
        rope=rope,
        max_length=9,
        draft_vocab_sha256="",
    )
    assert official_config(contract, tiny_target)["target_hidden_size"] == 64


def test_an_fp32_export_loads_in_bf16_with_exact_rotary_frequencies(exported, tiny_folder, tiny_target):
    half = Target.load(TargetConfig(name="half", path=str(tiny_folder), dtype="bfloat16", device="cpu"))
    drafter, _ = load_drafter(exported, half)
    assert drafter.fc.weight.dtype == drafter.lm_head.weight.dtype == torch.bfloat16
    exact, _ = load_drafter(exported, tiny_target)
    assert drafter.midlayer.rotary.inv_freq.dtype == torch.float32
    assert torch.equal(drafter.midlayer.rotary.inv_freq, exact.midlayer.rotary.inv_freq)


def test_default_taps_are_what_the_engines_default_to(tiny_target):
    assert default_taps(tiny_target.num_layers) == TAPS


def test_export_refuses_a_contract_of_another_drafter_or_target(tiny_target, tmp_path):
    drafter = build_drafter(tiny_target)
    good = describe(drafter, tiny_target)
    wrong_graph = dataclasses.replace(good, graph=good.graph | {"norm_output": True})
    with pytest.raises(ContractError, match="graph.norm_output is True.*has False"):
        export_drafter(drafter, tiny_target, wrong_graph, tmp_path / "x", command="c")
    with pytest.raises(ContractError, match="draft_vocab_sha256"):
        wrong = dataclasses.replace(good, draft_vocab_sha256="old")
        export_drafter(drafter, tiny_target, wrong, tmp_path / "x", command="c")
    with pytest.raises(ContractError, match="target_weights_sha256 is 'old'"):
        wrong = dataclasses.replace(good, target_weights_sha256="old")
        export_drafter(drafter, tiny_target, wrong, tmp_path / "x", command="c")
    assert list(tmp_path.iterdir()) == []


def test_export_refuses_weights_that_are_not_numbers(tiny_target, tmp_path):
    drafter = build_drafter(tiny_target)
    contract = describe(drafter, tiny_target)
    with torch.no_grad():
        drafter.midlayer.mlp.up_proj.weight[1, 1] = float("nan")
    with pytest.raises(ArtifactError, match="tensor midlayer.mlp.up_proj.weight holds NaN"):
        export_drafter(drafter, tiny_target, contract, tmp_path / "x", command="c")
    assert list(tmp_path.iterdir()) == []


def test_export_reads_back_what_it_wrote(tiny_target, tmp_path, monkeypatch):
    def faulty(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        bits = tensors["norm.weight"].view(torch.int16).clone()
        bits[5] ^= 1
        save_file(tensors | {"norm.weight": bits.view(torch.bfloat16)}, path, metadata=metadata)

    monkeypatch.setattr(native_module, "save_file", faulty)
    with pytest.raises(ArtifactError, match="tensor norm.weight reads back other than written"):
        export(tiny_target, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_fails_half_way_leaves_the_old_one(tiny_target, folder, monkeypatch):
    before = (folder / "manifest.json").read_bytes()

    def fail(*args: object) -> str:
        raise RuntimeError("killed here")

    monkeypatch.setattr(native_module, "model_card", fail)
    with pytest.raises(RuntimeError, match="killed here"):
        export(tiny_target, folder)
    assert (folder / "manifest.json").read_bytes() == before
    load_drafter(folder, tiny_target)


def test_card_without_a_report_claims_nothing(tiny_target, exported):
    card = (exported / "README.md").read_text(encoding="utf-8")
    assert "Not evaluated" in card and "speed-up" not in card
    assert "```\npython train.py target=tiny-random\n```" in card
    assert "| builtin | 320 | 41000 | written by the target itself |" in card
    assert tiny_target.fingerprint["target_weights_sha256"] in card
    assert card.startswith("---\n") and "base_model:" not in card.split("---")[1]


def test_card_with_a_report_shows_its_numbers_and_command(tiny_target):
    contract = describe(build_drafter(tiny_target), tiny_target)
    hub = dataclasses.replace(contract, target="org/model")
    data = dataclasses.replace(DATA, self_generated=False)
    card = model_card(hub, "Apache-2.0", "python train.py", data, REPORT)
    for line in (
        "base_model: org/model",
        "license: other\nlicense_name: apache-2.0\n",
        "| tau (acceptance length) | 2.345 |",
        "| acceptance at depth 1 | 0.750 |",
        "| acceptance at depth 2 | 0.432 |",
        "| accepted | 134 |",
        "| `transformers.generate` | not measured |",
        "| speed-up over plain decoding | 1.262 |",
        "| identical to plain decoding | 39 of 40 prompts |",
        "python serve.py drafter.path=X",
        "| builtin | 320 | 41000 | not written by the target |",
        "org/model is under Apache-2.0.",
    ):
        assert line in card, line
    assert "Not evaluated" not in card
    local = model_card(dataclasses.replace(contract, target="/home/me/models/mine"), "MIT", "c", None, None)
    assert "/home/me" not in local and "drafter for mine\n" in local and "base_model" not in local
    bare = model_card(contract, "", "python train.py", None, None)
    assert "is not recorded" in bare and "license" not in bare.split("---")[1] and "Not recorded." in bare


@pytest.mark.parametrize("key", REPORT)
def test_card_names_a_key_the_report_lacks(tiny_target, key):
    contract = describe(build_drafter(tiny_target), tiny_target)
    report = {name: value for name, value in REPORT.items() if name != key}
    with pytest.raises(ArtifactError, match=f"report: key {key} is missing"):
        model_card(contract, "", "c", None, report)
