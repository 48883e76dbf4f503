"""What is wrong with llama.cpp's two files is found and named: each tensor, each field, each file."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGUFReader

from drafters.export.forms import write_form
from drafters.export.gguf import TENSORS
from drafters.export.source import Source
from drafters.export.verify_gguf import verify_folder
from drafters.target import Target
from tests.drafters.export_setup import reseal
from tests.drafters.forms_setup import source_of


@pytest.fixture(scope="module")
def source(tiny_target, tiny_config, exported) -> Source:
    return source_of(exported, Target.load(tiny_config))


@pytest.fixture(scope="module")
def written(source, tmp_path_factory) -> Path:
    return write_form("gguf", source, tmp_path_factory.mktemp("gguf") / "gguf")


@pytest.fixture
def folder(written, tmp_path) -> Path:
    """A private copy, free to be damaged."""
    return Path(shutil.copytree(written, tmp_path / "copy"))


def found_in(folder: Path, source: Source) -> dict:
    return verify_folder(folder, source.target, source.folder)


def flip(path: Path, name: str) -> None:
    """Change one number of a tensor."""
    tensor = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == name)
    data = bytearray(path.read_bytes())
    data[tensor.data_offset + 1] ^= 1
    path.write_bytes(data)
    reseal(path.parent)


def test_a_sound_folder_is_found_sound_and_served_by_llama_cpp(written, source):
    found = found_in(written, source)
    assert found["errors"] == [] and found["round_trip"]
    assert found["probe"]["max_difference"] < 1e-4 and len(found["probe"]["accepted"]) == 3
    assert found["engines"]["llama.cpp"] == {
        "loads": True,
        "reasons": [],
        "command": f"llama-server -m {written}/target.gguf --spec-type draft-eagle3 --spec-draft-model "
        f"{written}/drafter.gguf --spec-draft-n-max 3",
    }


def test_a_changed_number_is_found_in_every_tensor(folder, source):
    official = {theirs: ours for ours, theirs in TENSORS.items()} | {"d2t": "d2t"}
    path = folder / "drafter.gguf"
    sound = path.read_bytes()
    names = [tensor.name for tensor in GGUFReader(path).tensors]
    assert len(names) == 14
    for name in names:
        flip(path, name)
        [*first, _] = found_in(folder, source)["errors"] + [""]
        assert any(official[name] in error for error in first), name
        path.write_bytes(sound)


def test_a_changed_number_is_found_in_the_target(folder, source):
    for name, ours in (("blk.3.attn_q.weight", "model.layers.3.self_attn.q_proj.weight"),
                       ("token_embd.weight", "model.embed_tokens.weight")):  # fmt: skip
        shutil.copyfile(folder / "target.gguf", folder / "kept")
        flip(folder / "target.gguf", name)
        found = found_in(folder, source)
        assert any(f"tensor {ours} holds other numbers" in error for error in found["errors"])
        assert not found["round_trip"] and not found["engines"]["llama.cpp"]["loads"]
        shutil.move(folder / "kept", folder / "target.gguf")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rms_norm_eps": 2e-5}, "rms_norm_eps is "),
        ({"max_position_embeddings": 256}, "max_position_embeddings is 256"),
        ({"norm_before_residual": True}, "norm_before_residual is True"),
    ],
)
def test_a_file_of_another_graph_is_named(source, tmp_path, changes, named):
    contract = replace(source.contract, graph=source.graph | changes)
    other = write_form("gguf", replace(source, contract=contract), tmp_path / "gguf")
    assert any(named in error for error in found_in(other, source)["errors"])


def test_other_taps_and_rotations_are_named(source, tmp_path):
    taps, rope = {"tap_indices": (1, 4, 5)}, {"rope": {"rope_type": "default", "rope_theta": 5e5}}
    for changes, named in ((taps, "taps are [1, 4, 5], expected [2, 4, 5]"), (rope, "rope_theta is 500000.0")):
        contract = replace(source.contract, **changes)
        other = write_form("gguf", replace(source, contract=contract), tmp_path / "gguf")
        assert any(named in error for error in found_in(other, source)["errors"])


def test_a_file_that_is_missing_or_cut_is_named(folder, source):
    (folder / "target.gguf").write_bytes((folder / "target.gguf").read_bytes()[:-9])
    assert "target.gguf" in found_in(folder, source)["errors"][0]
    (folder / "drafter.gguf").unlink()
    assert "drafter.gguf" in found_in(folder, source)["errors"][0]
