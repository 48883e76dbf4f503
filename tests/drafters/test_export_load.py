"""Anything changed in an export, or in the target, is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafters.errors import ArtifactError, ContractError
from drafters.export import load_drafter
from drafters.target import Target
from tests.drafters.export_setup import (
    OFFICIAL_NAMES,
    TAPS,
    edit_json,
    edit_tensors,
    put,
    reseal,
    retap,
)


@pytest.fixture
def folder(exported, tmp_path) -> Path:
    """A private copy of the export, free to be damaged."""
    return Path(shutil.copytree(exported, tmp_path / "copy"))


FILES = ["model.safetensors", "config.json", "contract.json", "probe.safetensors", "README.md"]


@pytest.mark.parametrize("name", FILES)
def test_one_changed_byte_is_refused_by_file(tiny_target, folder, name):
    data = bytearray((folder / name).read_bytes())
    data[-20] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(ArtifactError, match=rf"{name}: sha256"):
        load_drafter(folder, tiny_target)


@pytest.mark.parametrize("name", OFFICIAL_NAMES)
def test_every_tensor_is_missed_by_name(tiny_target, folder, name):
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ArtifactError, match=f"tensor {name} is missing"):
        load_drafter(folder, tiny_target)


def poison(tensor: Tensor) -> Tensor:
    tensor[3] = float("inf")
    return tensor


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.update(bias=torch.zeros(64)), "tensor bias is not part of this graph"),
        (lambda tensors: tensors.update(fc=tensors.pop("fc.weight")), "tensor fc is not part of this graph"),
        (put("fc.weight", lambda t: t[:, :-1]), r"fc.weight has shape \[64, 191\], expected \[64, 192\]"),
        (put("norm.weight", torch.Tensor.float), "norm.weight is torch.float32, expected torch.bfloat16"),
        (put("d2t", torch.Tensor.int), "tensor d2t is torch.int32, expected torch.int64"),
        (put("norm.weight", poison), "tensor norm.weight holds NaN or infinity"),
    ],
)
def test_extra_renamed_reshaped_retyped_and_infinite_tensors_are_named(tiny_target, folder, edit, message):
    edit_tensors(folder, edit)
    with pytest.raises(ArtifactError, match=message):
        load_drafter(folder, tiny_target)


def test_another_draft_vocabulary_is_refused(tiny_target, folder):
    def swap(tensors: dict[str, Tensor]) -> None:
        kept = torch.arange(128)
        tensors["d2t"] = torch.zeros(128, dtype=torch.int64)
        tensors["t2d"] = torch.zeros(512, dtype=torch.bool)
        tensors["t2d"][kept] = True

    edit_tensors(folder, swap)
    with pytest.raises(ContractError, match="draft_vocab_sha256 is "):
        load_drafter(folder, tiny_target)


def other(target: Target, **changes: object) -> Target:
    """The same target with parts exchanged; fingerprints are computed anew."""
    parts = {field.name: getattr(target, field.name) for field in dataclasses.fields(target)}
    return Target(**(parts | changes))


def test_a_target_with_one_changed_byte_is_refused(tiny_target, exported, tmp_path):
    copied = Path(shutil.copytree(tiny_target.folder, tmp_path / "target"))
    load_drafter(exported, other(tiny_target, folder=copied))
    data = bytearray((copied / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copied / "model.safetensors").write_bytes(data)
    with pytest.raises(ContractError, match="target_weights_sha256 is '.*Set target.path"):
        load_drafter(exported, other(tiny_target, folder=copied))


def test_another_token_map_or_template_is_refused(tiny_target, exported):
    tokenizer = copy.deepcopy(tiny_target.tokenizer)
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(ContractError, match="tokenizer_sha256 is .*Restore the tokenizer"):
        load_drafter(exported, other(tiny_target, tokenizer=tokenizer))
    tokenizer = copy.deepcopy(tiny_target.tokenizer)
    tokenizer.chat_template += " "
    with pytest.raises(ContractError, match="chat_template_sha256 is .*Restore the chat template"):
        load_drafter(exported, other(tiny_target, tokenizer=tokenizer))


def test_another_target_config_is_refused(tiny_target, exported):
    changed = other(tiny_target)
    changed.__dict__["fingerprint"] = tiny_target.fingerprint | {"target_config_sha256": "new"}
    with pytest.raises(ContractError, match="target_config_sha256 is .* has 'new'"):
        load_drafter(exported, changed)


def test_a_renamed_tap_is_refused_by_its_meaning(tiny_target, folder):
    taps = [f"output of block {index} before norm" for index in (2, 3, 4)]
    edit_json(folder, "contract.json", taps=taps)
    with pytest.raises(ContractError, match=r"taps is .*tap_indices \[2, 4, 5\] mean"):
        load_drafter(folder, tiny_target)


@pytest.mark.parametrize("indices", [(3, 4, 5), (2, 3, 5), (2, 4, 6), (4, 2, 5)])
def test_a_tap_changed_everywhere_is_refused_by_the_probe(tiny_target, folder, indices):
    retap(folder, *indices)
    place = next(place for place, index in enumerate(indices) if index != TAPS[place])
    meaning = f"output of block {indices[place] - 1} before norm"
    with pytest.raises(ContractError, match=rf"probe text 0: tap {place} \({meaning}\) differs by "):
        load_drafter(folder, tiny_target)


def test_a_tap_changed_in_the_contract_alone_is_refused_by_the_config(tiny_target, folder):
    taps = [f"output of block {index} before norm" for index in (2, 3, 4)]
    edit_json(folder, "contract.json", taps=taps, tap_indices=[3, 4, 5])
    with pytest.raises(ContractError, match=r"config.json: eagle_aux_\w+ is 'absent', .*\[3, 4, 5\]"):
        load_drafter(folder, tiny_target)


def test_another_number_of_taps_is_refused_by_the_shape_of_fc(tiny_target, folder):
    retap(folder, 2, 4)
    with pytest.raises(ArtifactError, match=r"tensor fc.weight has shape \[64, 192\], expected \[64, 128\]"):
        load_drafter(folder, tiny_target)


GRAPH_EDITS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 8,
    "num_kv_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "draft_vocab_size": 64,
    "fc_norm": True,
    "norm_output": True,
}


@pytest.mark.parametrize("key", GRAPH_EDITS)
def test_a_graph_that_is_not_the_configs_is_refused(tiny_target, folder, key):
    graph = json.loads((folder / "contract.json").read_text())["graph"]
    edit_json(folder, "contract.json", graph=graph | {key: GRAPH_EDITS[key]})
    with pytest.raises(ContractError, match=r"config\.json: \w+ is .* contract\.json says"):
        load_drafter(folder, tiny_target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "medusa"}, r"graph\.fc_norm is unknown"),
        ({"family": "oracle"}, "family is 'oracle', this code runs eagle, eagle3, hydra, medusa"),
        ({"feature_shift": 0}, "feature_shift is 0.* has 1"),
        ({"rope": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope is .*rope_type default"),
        ({"rope": {"rope_type": "default", "rope_theta": 5e5}}, r"json: rope_parameters is .*500000\.0"),
        ({"graph": {"target_hidden_size": 64, "vocab_size": 512}}, r"graph\.draft_vocab_size is missing"),
        ({"draft_vocab_sha256": "x"}, "draft_vocab_sha256 is 'x'"),
    ],
)
def test_contract_fields_this_code_cannot_run_are_named(tiny_target, folder, changes, message):
    edit_json(folder, "contract.json", **changes)
    with pytest.raises(ContractError, match=message):
        load_drafter(folder, tiny_target)


@pytest.mark.parametrize("key", ["layers", "num_taps"])
def test_unknown_and_inconsistent_graph_fields_are_named(tiny_target, folder, key):
    graph = json.loads((folder / "contract.json").read_text())["graph"]
    edit_json(folder, "contract.json", graph=graph | {key: 2})
    with pytest.raises(ContractError, match=rf"graph\.{key} is "):
        load_drafter(folder, tiny_target)


def test_a_config_edited_by_hand_is_refused(tiny_target, folder):
    edit_json(folder, "config.json", head_dim=16)
    with pytest.raises(ContractError, match="config.json: head_dim is 16, contract.json says 24"):
        load_drafter(folder, tiny_target)
    (folder / "config.json").write_text("{")
    reseal(folder)
    with pytest.raises(ArtifactError, match="config.json is not JSON"):
        load_drafter(folder, tiny_target)


def test_files_left_out_of_the_manifest_are_still_required(tiny_target, folder):
    path = folder / "manifest.json"
    for name in ("probe", "model"):
        manifest = json.loads(path.read_text())
        del manifest["files"][f"{name}.safetensors"]
        path.write_text(json.dumps(manifest))
        (folder / f"{name}.safetensors").unlink()
        with pytest.raises(ArtifactError, match=f"{name}.safetensors is missing"):
            load_drafter(folder, tiny_target)
