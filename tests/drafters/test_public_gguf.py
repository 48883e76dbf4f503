"""llama.cpp's file of an EAGLE-3 drafter reads back as the drafter it was written from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter

from drafters.errors import ArtifactError
from drafters.export import export_drafter, load_drafter
from drafters.export.gguf import DRAFTER_NAME, interleaved, write_drafter, write_target
from drafters.export.source import Source
from drafters.public.gguf import halves
from drafters.public.load import assemble, is_public, read_public
from tests.drafters.export_setup import build_drafter, describe
from tests.drafters.public_setup import IDS, states


@pytest.fixture(params=["scattered", "adjacent"])
def export(request, exported, tiny_target, tmp_path) -> Path:
    """An export; one keeps ids 1 to 128, which would be a map as offsets too."""
    if request.param == "scattered":
        return exported
    drafter = build_drafter(tiny_target, kept=torch.arange(1, 129))
    return export_drafter(drafter, tiny_target, describe(drafter, tiny_target), tmp_path / "export", command="c")


def test_it_is_the_same_drafter(export, tiny_target, tmp_path):
    drafter, contract = load_drafter(export, tiny_target)
    folder = tmp_path / "gguf"
    folder.mkdir()
    write_drafter(Source(drafter, contract, tiny_target, export), folder / DRAFTER_NAME)
    write_target(tiny_target, folder / "target.gguf")
    assert is_public(folder)
    public = read_public(folder, tiny_target)
    assert public.taps[0] == contract.tap_indices
    read = assemble(public, public.readings[0], tiny_target)
    mine, theirs = read.state_dict(), drafter.state_dict()
    assert mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)
    places = torch.arange(IDS.shape[1] - 1)[None]
    taps = states(tiny_target, contract.tap_indices)
    assert torch.allclose(read.first_logits(IDS, taps, places), drafter.first_logits(IDS, taps, places), atol=1e-3)


def test_rows_are_turned_back():
    weight = torch.randn(24, 5)
    assert halves(interleaved(weight, 3), 3).equal(weight) and not interleaved(weight, 3).equal(weight)


def test_a_file_of_another_kind_is_named(tmp_path, tiny_target):
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ArtifactError, match="holds model.gguf, of which none are of architecture eagle3"):
        read_public(tmp_path, tiny_target)
