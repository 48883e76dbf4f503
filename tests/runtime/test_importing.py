"""drafter.path takes folders and hub ids of drafters made elsewhere, and mode=import makes exports of them."""

from __future__ import annotations

import io
import json
import logging

import pytest
from rich.console import Console
from safetensors.torch import load_file

from drafters.artifacts import verify_folder
from drafters.errors import ArtifactError, ConfigError
from drafters.export.native import load_drafter
from drafters.models.eagle3 import Eagle3Drafter
from drafters.public import hub
from drafters.public.folder import open_folder
from drafters.public.load import resolve_public
from drafters.target_sources import HUB_FILES
from runtime.engine import Engine, EngineConfig
from runtime.importing import IMPORT_NAME, import_drafter
from runtime.loading import load_proposer
from runtime.proposers.eagle import EagleProposer
from runtime.proposers.heads import HeadsProposer
from runtime.proposers.small import SmallProposer
from runtime.sampling import SamplingParams
from tests.drafters.public_setup import SIZES, drawn, eagle3, fitted, write
from tests.drafters.test_public_formats import eagle, medusa
from tests.helpers import complaint, settings


@pytest.fixture(scope="module")
def public(tiny_target, tmp_path_factory):
    """A drafter that fits the tiny target, one flag and the ids of another convention included."""
    config, tensors = eagle3(draft_ids=None, intermediate_size=512, norm_before_residual=True)
    tensors = fitted(tensors, config, tiny_target, (2, 4, 6), tensors["lm_head.weight"])
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    return write(tmp_path_factory.mktemp("public") / "drafter", config, tensors)


@pytest.fixture
def own_target(tiny_target, monkeypatch):
    """The target that settings name is the one loaded already."""
    monkeypatch.setattr("runtime.importing.Target.load", lambda config: tiny_target)


def imported(folder, dest):
    console = Console(file=io.StringIO(), width=200)
    run = settings("serve", "target=tiny-random", "mode=import", f"drafter.path={folder}", f"output_dir={dest}")
    return import_drafter(run, console, "python serve.py mode=import"), console.file.getvalue()


def test_a_public_folder_drafts_and_changes_no_token(tiny_target, public):
    proposer = load_proposer(str(public), tiny_target, EngineConfig())
    assert type(proposer) is EagleProposer and proposer.taps == (2, 4, 6)
    prompts, params = ["hello there"], SamplingParams(8)
    plain = Engine.load(tiny_target, "none").generate(prompts, params)
    for path in (public, f"{public}+ngram"):
        drafted = Engine.load(tiny_target, str(path), num_draft_tokens=8).generate(prompts, params)
        assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]


def test_other_public_folders_draft_too(tiny_target, tiny_folder, tmp_path):
    heads = write(tmp_path / "medusa", {"medusa_num_heads": 3, "medusa_num_layers": 1}, medusa())
    assert type(load_proposer(str(heads), tiny_target, EngineConfig())) is HeadsProposer
    assert type(load_proposer(str(write(tmp_path / "eagle", *eagle())), tiny_target, EngineConfig())) is EagleProposer
    config, tensors = open_folder(tiny_folder).config, load_file(tiny_folder / "model.safetensors")
    # With a head of its own, for which an export has no place: small models are run as they are.
    small = write(tmp_path / "small", config, tensors | {"lm_head.weight": 1.1 * tensors["lm_head.weight"]})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (small / name).write_bytes((tiny_folder / name).read_bytes())
    assert type(load_proposer(str(small), tiny_target, EngineConfig())) is SmallProposer


@pytest.mark.usefixtures("own_target")
def test_an_import_is_an_export_that_computes_the_same(tiny_target, public, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    export, shown = imported(public, tmp_path / "out")
    assert export == tmp_path / "out" / "export" and "taken" in shown and "only measured" in shown
    names = verify_folder(export).files
    assert {"contract.json", "probe.safetensors", "model.safetensors", "config.json", IMPORT_NAME} <= set(names)
    drafter, contract = load_drafter(export, tiny_target)
    assert contract.tap_indices == (2, 4, 6) and contract.graph["norm_before_residual"] is True
    found = resolve_public(public, tiny_target)
    for name, tensor in found.reading.tensors.items():
        exact = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert drafter.exported_state()[name].equal(exact.to(drafter.exported_state()[name].dtype)), name
    told = json.loads((export / IMPORT_NAME).read_text())
    assert told["format"] == "eagle3" and told["taken"] == found.reading.title
    taken = next(entry for entry in told["measured"] if entry["reading"] == told["taken"])
    assert taken["taps"] == [2, 4, 6] and taken["accepted"] / taken["positions"] > 0.9 and not taken["by_chance"]
    # The tensors are fp32, exports bf16: what that costs is said.
    assert told["rounded"]["tensors"] > 0 and told["rounded"]["accepted"] <= taken["positions"]
    assert "are rounded" in caplog.text
    with pytest.raises(ConfigError, match="there is nothing to import"):
        imported(export, tmp_path / "again")


@pytest.mark.usefixtures("own_target")
@pytest.mark.parametrize(
    "flags",
    [
        {"norm_before_fc": True, "attention_bias": True, "norm_before_residual": True},
        {"fc_norm": True, "norm_output": True, "bias": True},
        {"head_dim": 24, "qk_norm": True, "embed": True},
        {"head": False, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"hidden_size": 32, "target_hidden_size": 64, "embed": True},
    ],
)
def test_every_variant_survives_an_import_bit_for_bit(tiny_target, tmp_path, flags, caplog):
    config, tensors = eagle3(**flags)
    halved = {name: each.bfloat16() if each.is_floating_point() else each for name, each in tensors.items()}
    folder = write(tmp_path / "a", config, halved)
    export, _ = imported(folder, tmp_path / "out")
    assert "are rounded" not in caplog.text and "rounded" not in json.loads((export / IMPORT_NAME).read_text())
    drafter, contract = load_drafter(export, tiny_target)
    found = resolve_public(folder, tiny_target)
    assert isinstance(drafter, Eagle3Drafter) and drafter.shape == found.reading.shape and contract == found.contract
    mine, theirs = drafter.state_dict(), found.drafter.state_dict()
    assert mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)
    said = json.loads((export / "config.json").read_text())  # what engines read of it
    assert {key: said[key] for key in flags if key not in ("embed", "head")} == {
        key: value for key, value in flags.items() if key not in ("embed", "head")
    }


@pytest.mark.usefixtures("own_target")
def test_eagle_and_medusa_imports(tiny_target, tmp_path):
    folders = {
        "eagle": write(tmp_path / "e", *eagle(fc_bias=True, head=True)),
        "medusa": write(tmp_path / "m", {"medusa_num_heads": 3, "medusa_num_layers": 1}, medusa()),
    }
    for family, folder in folders.items():
        export, _ = imported(folder, tmp_path / f"{family}-out")
        drafter, contract = load_drafter(export, tiny_target)
        assert contract.family == family == drafter.family


# ---- hub ids


def test_a_hub_id_is_fetched_and_loaded(tiny_target, public, monkeypatch):
    asked = []

    def snapshot(hub_id, revision, where, setting, files, kind):
        asked.append((hub_id, setting, kind))
        assert set(HUB_FILES) < set(files) and not {"*.bin", "*.pt"} & set(files)
        return public

    monkeypatch.setattr(hub, "hub_snapshot", snapshot)
    proposer = load_proposer("org/drafter", tiny_target, EngineConfig())
    assert proposer.taps == (2, 4, 6) and set(asked) == {("org/drafter", "drafter.path", ArtifactError)}


def test_a_hub_that_cannot_be_reached_is_one_clear_error(tiny_target, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", refuse)
    with pytest.raises(ArtifactError, match="'org/never-fetched' .no folder here, so a hub id.*cannot be reached"):
        load_proposer("org/never-fetched", tiny_target, EngineConfig())


# ---- settings


def test_what_mode_import_takes(tmp_path):
    for path in ("null", "ngram", "a/b+suffix"):
        assert "mode=import makes an export of one drafter" in complaint("serve", "mode=import", f"drafter.path={path}")
    assert settings("serve", "mode=import", "drafter.path=org/name", f"output_dir={tmp_path}").mode == "import"


def test_a_small_model_of_another_kind_needs_no_import(tiny_target, tmp_path):
    sizes = {"model.embed_tokens.weight": (512, 64), "model.norm.weight": (64,)}
    sizes |= {"model.layers.0.input_layernorm.weight": (64,)}
    folder = write(tmp_path / "a", SIZES | {"architectures": ["LlamaForCausalLM"]}, drawn(sizes))
    with pytest.raises(ConfigError, match="model.embed_tokens.weight is not the target's.*drafter.path=small:"):
        resolve_public(folder, tiny_target)
