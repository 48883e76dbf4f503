"""Pickled weights become safetensors by the explicit command alone, and no code of a file is run."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafters.errors import ArtifactError
from drafters.public import convert as module
from drafters.public.convert import convert, main
from drafters.public.load import is_public, read_public
from tests.drafters.public_setup import eagle3
from tests.helpers import ROOT


@pytest.fixture
def pickled(tmp_path) -> Path:
    config, tensors = eagle3()
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "README.md").write_text("not needed")
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


def test_a_converted_folder_loads_and_holds_the_same_bits(tiny_target, pickled, tmp_path):
    with pytest.raises(ArtifactError, match="pytorch_model.bin.*drafters.public.convert"):
        read_public(pickled, tiny_target)
    dest = convert(pickled, tmp_path / "new")
    assert {path.name for path in dest.iterdir()} == {"config.json", "model.safetensors", "manifest.json"}
    found = load_file(dest / "model.safetensors")
    tensors = eagle3()[1]
    assert found.keys() == tensors.keys() and all(found[name].equal(tensors[name]) for name in tensors)
    assert is_public(dest) and read_public(dest, tiny_target).family == "eagle3"


def test_shards_are_joined_and_other_names_kept(pickled, tmp_path):
    tensors = eagle3()[1]
    names = sorted(tensors)
    (pickled / "pytorch_model.bin").unlink()
    torch.save({name: tensors[name] for name in names[:4]}, pickled / "pytorch_model-00001-of-00002.bin")
    torch.save({name: tensors[name] for name in names[4:]}, pickled / "pytorch_model-00002-of-00002.bin")
    (pickled / "pytorch_model.bin.index.json").write_text("{}")
    torch.save({"0.0.linear.weight": torch.ones(2, 2)}, pickled / "medusa_lm_head.pt")
    dest = convert(pickled, tmp_path / "new")
    assert load_file(dest / "model.safetensors").keys() == tensors.keys()
    assert load_file(dest / "medusa_lm_head.safetensors").keys() == {"0.0.linear.weight"}
    assert not (dest / "pytorch_model.bin.index.json").exists()
    torch.save({names[0]: tensors[names[0]]}, pickled / "pytorch_model-00003-of-00002.bin")
    with pytest.raises(ArtifactError, match=f"tensor {names[0]} is in another file"):
        convert(pickled, tmp_path / "newer")


def test_tensors_that_share_memory_become_two(pickled, tmp_path):
    one = torch.arange(4.0)
    torch.save({"a": one, "b": one, "c": one.view(2, 2).T}, pickled / "pytorch_model.bin")
    found = load_file(convert(pickled, tmp_path / "new") / "model.safetensors")
    assert found["a"].equal(one) and found["b"].equal(one) and found["c"].equal(one.view(2, 2).T)


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.write_text, (self.marker, "ran")


def test_code_in_a_file_is_not_run(pickled, tmp_path):
    marker = tmp_path / "marker"
    torch.save({"fc.weight": Evil(marker)}, pickled / "pytorch_model.bin")
    with pytest.raises(ArtifactError, match="pytorch_model.bin holds more than weights"):
        convert(pickled, tmp_path / "new")
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises(ArtifactError, match="pytorch_model.bin holds more than weights"):
        convert(pickled, tmp_path / "new")
    assert not marker.exists() and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ({"state_dict": {"a": torch.ones(1)}}, "entry 'state_dict' is a dict, not a tensor"),
        ([torch.ones(1)], "holds a list, not tensors by name"),
        ({"step": 3}, "entry 'step' is a int"),
    ],
)
def test_what_is_no_tensor_is_named(pickled, tmp_path, content, wrong):
    torch.save(content, pickled / "pytorch_model.bin")
    with pytest.raises(ArtifactError, match=wrong):
        convert(pickled, tmp_path / "new")


def test_nothing_to_convert_and_no_place_to_put_it(pickled, tmp_path):
    with pytest.raises(ArtifactError, match="is the folder to convert"):
        convert(pickled, pickled)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    with pytest.raises(ArtifactError, match="will not be replaced"):
        convert(pickled, tmp_path / "full")
    (pickled / "pytorch_model.bin").unlink()
    with pytest.raises(ArtifactError, match="there is nothing to convert"):
        convert(pickled, tmp_path / "new")


def test_the_command_says_what_it_did_and_errors_in_one_line(pickled, tmp_path, capsys):
    main([str(pickled), str(tmp_path / "new")])
    assert "converted to" in capsys.readouterr().out
    for arguments, status, wrong in (
        ([str(pickled)], 2, "two arguments are needed"),
        ([str(tmp_path / "none"), "x"], 2, "is neither a folder nor a hub id"),
        ([str(tmp_path / "new"), str(tmp_path / "x")], 1, "there is nothing to convert"),
    ):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == status and wrong in capsys.readouterr().err


@pytest.mark.slow
def test_it_runs_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", module.__name__, "one"], env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("error: two arguments are needed")
