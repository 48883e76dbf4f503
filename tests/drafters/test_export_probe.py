"""The probe catches what no hash can: the same files, computed otherwise."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafters.errors import ArtifactError, ContractError
from drafters.export import load_drafter
from drafters.export.probe import Probe, check_probe, make_probe
from tests.drafters.export_setup import (
    OFFICIAL_NAMES,
    SHAPE,
    TAPS,
    build_drafter,
    edit_tensors,
    put,
    reseal,
)


@pytest.fixture
def folder(exported, tmp_path) -> Path:
    """A private copy of the export, free to be damaged."""
    return Path(shutil.copytree(exported, tmp_path / "copy"))


@pytest.mark.parametrize("name", [name for name in OFFICIAL_NAMES if name not in ("d2t", "t2d")])
def test_the_probe_sees_a_change_in_every_weight(tiny_target, folder, name):
    edit_tensors(folder, put(name, lambda tensor: tensor.flip(0)))
    with pytest.raises(ContractError, match="probe text 0: drafter logits differ by "):
        load_drafter(folder, tiny_target)


def test_the_probe_counts_what_the_target_accepts(tiny_target, exported):
    ids = Probe.read(exported / "probe.safetensors").ids
    # A drafter that knows only the target's two favourite ids is right now and then.
    with torch.no_grad():
        favourites = tiny_target.model(ids).logits.argmax(-1).flatten().bincount().topk(2).indices
    shape = dataclasses.replace(SHAPE, draft_vocab_size=2)
    drafter = build_drafter(tiny_target, shape, favourites.sort().values)
    probe = make_probe(drafter, tiny_target, TAPS)
    assert 0 < int(probe.accepted.sum()) < probe.hits.numel()
    rows, length = probe.ids.shape
    assert rows == 3 and length > 10 and probe.dtype == "float32"
    accepted = []
    for ids in probe.ids:
        # Written without the probe's own pass: one token at a time from the model's public outputs.
        out = tiny_target.model(ids[None], output_hidden_states=True)
        count = 0
        for position in range(length - 1):
            taps = torch.cat([out.hidden_states[index][:, : position + 1] for index in TAPS], -1)
            shifted, steps = ids[None, 1 : position + 2], torch.arange(position + 1)[None]
            causal = torch.nn.functional.scaled_dot_product_attention

            def attend(q: Tensor, k: Tensor, v: Tensor, causal: Callable = causal) -> Tensor:
                return causal(q, k, v, is_causal=True, enable_gqa=True)

            with torch.no_grad():
                hidden = drafter.forward_layer(shifted, drafter.fuse(taps), steps, attend)
                choice = drafter.draft_to_target(drafter.logits(hidden[0, -1]).argmax())
            count += int(choice == out.logits[0, position + 1].argmax())
        accepted.append(count)
    assert probe.accepted.tolist() == accepted == probe.hits.sum(-1).tolist()


def test_a_changed_accepted_count_is_refused(tiny_target, folder):
    margins = Probe.read(folder / "probe.safetensors").margin
    text, position = divmod(int(margins.argmax()), margins.shape[1])

    def flip(tensors: dict[str, Tensor]) -> None:
        tensors["hits"][text, position] ^= True
        tensors["accepted"] = tensors["hits"].sum(-1)

    edit_tensors(folder, flip, "probe.safetensors")
    with pytest.raises(ContractError, match=rf"probe text {text}: \d+ positions accepted, recorded \d+"):
        load_drafter(folder, tiny_target)


def test_a_near_tie_may_fall_either_way(tiny_target, folder):
    def flip(tensors: dict[str, Tensor]) -> None:
        tensors["hits"][1, 4] ^= True
        tensors["margin"][1, 4] = 1e-4

    edit_tensors(folder, flip, "probe.safetensors")
    _, contract = load_drafter(folder, tiny_target)
    assert contract.tap_indices == TAPS


def test_probe_replay_refuses_nan(tiny_target, exported):
    drafter, _ = load_drafter(exported, tiny_target)
    probe = Probe.read(exported / "probe.safetensors")
    check_probe(probe, drafter, tiny_target, TAPS)
    with torch.no_grad():
        drafter.norm.weight[0] = float("nan")
    with pytest.raises(ContractError, match="probe text 0: drafter logits differ by nan"):
        check_probe(probe, drafter, tiny_target, TAPS)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop("margin"), "tensor margin .* is missing"),
        (put("logits", lambda t: t[:, :-1]), r"tensor logits has shape .* expected"),
    ],
)
def test_a_malformed_probe_is_named(tiny_target, folder, edit, message):
    edit_tensors(folder, edit, "probe.safetensors")
    with pytest.raises(ArtifactError, match=message):
        load_drafter(folder, tiny_target)
    edit_tensors(folder, lambda tensors: None, "model.safetensors")
    (folder / "probe.safetensors").write_bytes(b"junk")
    reseal(folder)
    with pytest.raises(ArtifactError, match="probe.safetensors is not a safetensors file"):
        load_drafter(folder, tiny_target)


def test_a_probe_of_another_model_is_refused(tiny_target, exported):
    drafter, _ = load_drafter(exported, tiny_target)
    probe = Probe.read(exported / "probe.safetensors")
    for name in ("ids", "columns"):
        with pytest.raises(ContractError, match="do not fit this drafter"):
            larger = dataclasses.replace(probe, **{name: getattr(probe, name) + 500})
            check_probe(larger, drafter, tiny_target, TAPS)
    with pytest.raises(ContractError, match="or 3 taps do not fit"):
        check_probe(probe, drafter, tiny_target, (*TAPS, 7))
