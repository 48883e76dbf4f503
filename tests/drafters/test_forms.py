"""Dialects: each holds the drafter bit for bit, says what its engine needs, and refuses what it has no place for."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafters.config_export import DIALECTS
from drafters.errors import ArtifactError, ConfigError
from drafters.export.forms import FORMS, write_form
from drafters.export.official import official_config
from drafters.target import Target
from tests.drafters.export_setup import SHAPE, export
from tests.drafters.forms_setup import KINDS, WRITTEN, native, read_back_elsewhere, source_of


@pytest.fixture(scope="module")
def fresh(tiny_target, tiny_config) -> Target:
    """A target that no engine has touched, in the same cache."""
    return Target.load(tiny_config)


@pytest.fixture(scope="module")
def sources(fresh, tmp_path_factory):
    """A native export of every kind, loaded."""
    root = tmp_path_factory.mktemp("native")
    return {kind: source_of(native(fresh, root / kind, cfg), fresh) for kind, cfg in KINDS.items()}


@pytest.fixture(scope="module")
def folders(sources, tmp_path_factory) -> dict[tuple[str, str], Path]:
    """Every dialect of WRITTEN, written."""
    root = tmp_path_factory.mktemp("dialects")
    return {(name, kind): write_form(name, sources[kind], root / f"{name}.{kind}") for name, kind in WRITTEN}


@pytest.fixture(scope="module")
def read(folders, sources, fresh):
    """What another process read back from them."""
    jobs = [(name, str(folder), str(sources[kind].folder)) for (name, kind), folder in folders.items()]
    return dict(zip(folders, read_back_elsewhere(jobs, fresh), strict=True))


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_the_forms_are_the_dialects_that_can_be_asked_for():
    assert {name: form.families for name, form in FORMS.items()} == DIALECTS
    assert {name for name, _ in WRITTEN} | {"gguf"} == set(FORMS)


@pytest.mark.parametrize(("name", "kind"), WRITTEN)
def test_a_fresh_process_reads_every_dialect_back_bit_for_bit(read, name, kind):
    found = read[name, kind]
    assert found["names"] == [] and found["reader"] == []
    there, drafted = map(int, found["vocabulary"])
    assert there == (512 if FORMS[name].whole_vocabulary else drafted)


@pytest.mark.parametrize(("name", "kind"), WRITTEN)
def test_a_dialect_folder_holds_its_weights_and_no_other_safetensors(folders, sources, name, kind):
    folder = folders[name, kind]
    files = [path.name for path in folder.glob("*.safetensors")]
    assert files == ["medusa_lm_head.safetensors" if name in ("medusa-v1", "medusa-v2") else "model.safetensors"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["kind"], manifest["dialect"]) == ("dialect", name)
    card = (folder / "README.md").read_text()
    assert f"Written in the dialect `{name}`" in card and FORMS[name].use in card and "Not evaluated" in card
    assert "`contract.json`, is in the export" in card and "the loader checks it" not in card
    assert ("draft over all 512 ids" in card) == FORMS[name].widens(sources[kind])


def test_an_index_names_the_one_file_of_an_export_that_engines_are_to_read(sources):
    for kind in ("eagle3", "eagle", "mtp", "small"):
        folder = sources[kind].folder
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
        assert (folder / "probe.safetensors").is_file()
    assert not (sources["medusa"].folder / "model.safetensors.index.json").exists()


# ---- what each says


def test_eagle3_is_the_native_config_and_names(folders, sources):
    folder, source = folders["eagle3", "eagle3"], sources["eagle3"]
    assert config(folder) == config(source.folder) == official_config(source.contract, source.target)
    assert load_file(folder / "model.safetensors").keys() == load_file(source.folder / "model.safetensors").keys()
    assert not (folder / "config.sglang.json").exists()


def test_eagle3_with_custom_taps_has_a_config_for_each_way_of_counting(fresh, tmp_path):
    source = source_of(export(fresh, tmp_path / "native", replace(SHAPE, num_taps=2), (3, 7)), fresh)
    folder = write_form("eagle3", source, tmp_path / "eagle3")
    assert config(folder)["eagle_aux_hidden_state_layer_ids"] == [3, 7]
    nested = json.loads((folder / "config.sglang.json").read_text())["eagle_config"]
    assert nested["eagle_aux_hidden_state_layer_ids"] == [2, 6]
    folder = write_form("speculators", source, tmp_path / "speculators")
    assert config(folder)["eagle_aux_hidden_state_layer_ids"] == [3, 7]


def test_speculators_says_every_flag_and_brings_the_embedding(folders, sources, fresh):
    folder, said = folders["speculators", "eagle3"], config(folders["speculators", "eagle3"])
    assert said["architectures"] == ["Eagle3DraftModel"] and said["speculators_model_type"] == "eagle3"
    flags = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": True, "norm_output": False}
    assert {name: said[name] for name in flags} == flags
    assert said["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert said["speculators_config"] == {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 2, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        ],
        "verifier": {"name_or_path": str(fresh.folder), "architectures": ["LlamaForCausalLM"]},
    }
    layer = said["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"], layer["vocab_size"]) == ("llama", 1, 512)
    assert (said["draft_vocab_size"], said["target_hidden_size"], said["tie_word_embeddings"]) == (128, None, False)
    tensors = load_file(folder / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"].float(), fresh.embed_weight)
    assert {"layers.0.hidden_norm.weight", "fc_norm.2.weight", "d2t", "t2d", "lm_head.weight"} <= tensors.keys()
    assert not any(name.startswith(("midlayer.", "verifier_")) for name in tensors)


def test_there_is_no_map_of_the_whole_vocabulary(fresh, tmp_path):
    source = source_of(export(fresh, tmp_path / "native", replace(SHAPE, draft_vocab_size=512)), fresh)
    for name in ("eagle3", "speculators"):
        tensors = load_file(write_form(name, source, tmp_path / name) / "model.safetensors")
        assert not {"d2t", "t2d"} & tensors.keys() and tensors["lm_head.weight"].shape == (512, 64)


def test_a_hub_target_is_named_by_its_id(sources):
    source = sources["eagle3"]
    contract = replace(source.contract, target="org/model")
    moved = replace(source.target, config=replace(source.target.config, path="org/model"))
    assert replace(source, contract=contract, target=moved).target_path == "org/model"
    assert source.target_path == str(source.target.folder)


def test_eagle_differs_by_engine_in_architecture_and_bias(folders):
    vllm, sglang = (folders[name, "eagle"] for name in ("eagle-vllm", "eagle-sglang"))
    assert (config(vllm)["architectures"], config(vllm)["bias"]) == (["LlamaForCausalLM"], False)
    assert (config(sglang)["architectures"], config(sglang)["bias"]) == (["LlamaForCausalLMEagle"], True)
    first, second = (load_file(folder / "model.safetensors") for folder in (vllm, sglang))
    bias = second.pop("fc.bias")
    assert bias.dtype == torch.bfloat16 and bias.shape == (64,) and not bias.any()
    assert first.keys() == second.keys() and "fc.weight" in first
    assert not any("input_layernorm" in name or "lm_head" in name for name in first)


def test_medusa_has_no_architectures_but_for_vllm(folders, fresh):
    for name, kind, layout in (("medusa-v1", "medusa-own", {}), ("medusa-v2", "medusa", {"version": "2"})):
        cfg = KINDS[kind]
        assert config(folders[name, kind]) == {
            "medusa_num_heads": cfg.num_heads,
            "medusa_num_layers": cfg.num_layers,
            "base_model_name_or_path": str(fresh.folder),
        } | layout
    assert "0.2.weight" in load_file(folders["medusa-v1", "medusa-own"] / "medusa_lm_head.safetensors")


@pytest.mark.parametrize("kind", ["medusa", "medusa-own", "medusa-few"])
def test_medusa_for_vllm_maps_a_draft_vocabulary_and_brings_its_heads(folders, sources, fresh, kind):
    folder, cfg, source = folders["medusa-vllm", kind], KINDS[kind], sources[kind]
    assert config(folder) == {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": 64,
        "vocab_size": 512,
        "truncated_vocab_size": cfg.draft_vocab_size,
        "num_heads": cfg.num_heads,
        "num_hidden_layers": cfg.num_layers,
        "max_paths": 64,
        "topk": 10,
        "medusa_fc_bias": True,
        "original_lm_head": not cfg.own_heads,
        "torch_dtype": "bfloat16",
    }
    tensors = load_file(folder / "model.safetensors")
    kept = source.tensors["t2d"].nonzero().flatten()
    if cfg.draft_vocab_size < 512:
        assert torch.equal(tensors["token_map"], kept)
    else:
        assert "token_map" not in tensors
    if cfg.own_heads:
        assert tensors["lm_heads.1.weight"].shape == (cfg.draft_vocab_size, 64) and "lm_head.weight" not in tensors
    else:
        assert torch.equal(tensors["lm_head.weight"].float(), fresh.head_weight[kept])


def test_the_merged_model_says_what_the_tuned_target_says(folders, sources):
    folder, source = folders["medusa2-merged", "medusa2"], sources["medusa2"]
    said = config(folder)
    assert said["architectures"] == ["LlamaForCausalLM"] and said["version"] == "2"
    assert (said["medusa_num_heads"], said["medusa_num_layers"]) == (2, 1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        found, tuned = model(ids).logits, source.target.model(ids).logits
        plain = Target.load(source.target.config).model(ids).logits
    assert torch.equal(found, tuned) and not found.allclose(plain, atol=1e-2)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == source.target.tokenizer.get_vocab()
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == source.target.dtype


def test_mtp_brings_embedding_and_head_under_the_names_of_each(folders, fresh):
    deepseek, qwen = (folders[name, "mtp"] for name in ("mtp-deepseek", "mtp-qwen3next"))
    for folder, embed, head in (
        (deepseek, "model.layers.8.embed_tokens.weight", "model.layers.8.shared_head.head.weight"),
        (qwen, "model.embed_tokens.weight", "lm_head.weight"),
    ):
        tensors = load_file(folder / "model.safetensors")
        assert torch.equal(tensors[embed].float(), fresh.embed_weight)
        assert torch.equal(tensors[head].float(), fresh.head_weight)
        assert config(folder)["draft_vocab_size"] == 512 and config(folder)["num_hidden_layers"] == 8
    assert config(deepseek)["num_nextn_predict_layers"] == 1
    assert config(qwen)["mtp_num_hidden_layers"] == 1 and "num_nextn_predict_layers" not in config(qwen)
    assert config(qwen)["architectures"] == ["Qwen3NextMTP"]


def test_small_is_a_model_that_transformers_runs(folders, sources):
    folder, source = folders["small", "small"], sources["small"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(3, 20)[None]
    kept = source.tensors["t2d"]
    with torch.no_grad():
        found, ours = model(ids).logits[..., kept], source.drafter.language_model()(ids).logits
    torch.testing.assert_close(found, ours, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == source.target.tokenizer.get_vocab()


# ---- what each refuses


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("medusa-v1", "medusa", "=medusa-v1 cannot hold this drafter: its heads read .*to medusa-v2 or medusa-vllm"),
        ("medusa-v1", "medusa-few", "rows for 300 of 512 ids.*Set export.dialect to medusa-vllm"),
        ("medusa-v2", "medusa-own", "has an output head of its own.*to medusa-v1 or medusa-vllm"),
        ("medusa-v2", "medusa2", "medusa-v2 is for drafters of family medusa, .* family medusa2. .*medusa2-merged"),
        ("eagle3", "eagle", "eagle3 is for drafters of family eagle3.*to some of eagle-vllm, eagle-sglang"),
        ("gguf", "small", "gguf is for drafters of family eagle3"),
        ("small", "hydra", "of family hydra. Leave export.dialect out"),
    ],
)
def test_a_dialect_refuses_what_it_has_no_place_for(sources, tmp_path, name, kind, message):
    for attempt in (lambda: write_form(name, sources[kind], tmp_path / "x"),
                    lambda: FORMS[name].write(sources[kind], tmp_path)):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            attempt()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "flags", "problem"),
    [
        ("speculators", {"target_hidden_size": 128}, "64 wide and its target 128"),
        ("speculators", {"fc_bias": True}, "its fc has a bias"),
        ("speculators", {"norm_before_fc": True}, "norm_before_fc and fc_norm"),
        ("eagle3", {"qk_norm": True}, "qk_norm"),
    ],
)
def test_variants_of_eagle3_are_refused_where_they_have_no_place(sources, name, flags, problem):
    source = sources["eagle3"]
    changed = replace(source, contract=replace(source.contract, graph=source.graph | flags))
    with pytest.raises(ConfigError, match=f"export.dialect={name} .*{problem}.*Set export.dialect to"):
        FORMS[name].check(changed)


@pytest.mark.parametrize(
    ("name", "flags", "problem"),
    [
        ("eagle-sglang", {"own_embedding": True}, "an embedding of its own.*to eagle-vllm"),
        ("eagle-sglang", {"own_head": True}, "an output head of its own.*No dialect can"),
        ("eagle-vllm", {"own_head": True}, "rows for 300 of 512.*No dialect can"),
    ],
)
def test_variants_of_eagle_are_refused_where_they_have_no_place(sources, name, flags, problem):
    source = sources["eagle"]
    changed = replace(source, contract=replace(source.contract, graph=source.graph | flags))
    changed.__dict__["tensors"] = source.tensors
    with pytest.raises(ConfigError, match=problem):
        FORMS[name].check(changed)


def test_a_bias_of_fc_is_dropped_for_vllm_only_where_it_is_zero(sources, tmp_path):
    source = sources["eagle"]
    changed = replace(source, contract=replace(source.contract, graph=source.graph | {"fc_bias": True}))
    for value, wrong in ((0.0, False), (0.5, True)):
        changed.__dict__["tensors"] = source.tensors | {"block.fc.bias": torch.full((64,), value)}
        if wrong:
            with pytest.raises(ConfigError, match="bias other than zero.*Set export.dialect to eagle-sglang"):
                FORMS["eagle-vllm"].check(changed)
        else:
            FORMS["eagle-vllm"].write(changed, tmp_path)
            assert "fc.bias" not in load_file(tmp_path / "model.safetensors") and not config(tmp_path)["bias"]
    (tmp_path / "sglang").mkdir()
    FORMS["eagle-sglang"].write(changed, tmp_path / "sglang")
    assert float(load_file(tmp_path / "sglang" / "model.safetensors")["fc.bias"].min()) == 0.5


def test_an_export_whose_card_was_cut_is_refused(sources, tmp_path):
    folder = Path(shutil.copytree(sources["eagle3"].folder, tmp_path / "copy"))
    card = (folder / "README.md").read_text()
    (folder / "README.md").write_text(card[: card.index("## Use")])
    with pytest.raises(ArtifactError, match="no section Use"):
        write_form("eagle3", replace(sources["eagle3"], folder=folder), tmp_path / "x")
