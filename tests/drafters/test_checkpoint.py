"""Checkpoints: bit-equal round trip, weights-only folders, refusals by name, kills at any point."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import save_file

from drafters import artifacts, checkpoint
from drafters.checkpoint import Progress
from drafters.errors import ArtifactError, ContractError
from drafters.export.native import describe_drafter
from tests.drafters.training_setup import make_records, new_drafter, run_settings

PROGRESS = Progress(step=7, best_value=1.5, best_step=5, run={"trainer.seed": 0, "trainer.betas": [0.9, 0.95]})
MOMENTS = {"0.master": torch.arange(3.0), "0.exp_avg": torch.tensor([0.1, -0.2, 0.3]), "0.step": torch.tensor(7.0)}


@pytest.fixture
def drafter(tiny_target):
    return new_drafter(tiny_target, make_records(6), run_settings(tiny_target))


@pytest.fixture
def contract(drafter, tiny_target):
    return describe_drafter(drafter, tiny_target, taps=(2, 4, 5), steps=2, max_length=64)


@pytest.fixture
def saved(drafter, contract, tmp_path):
    checkpoint.save(tmp_path / "last", checkpoint.weights_of(drafter), PROGRESS, contract, MOMENTS)
    return tmp_path / "last"


def test_round_trip_is_bit_equal(saved, drafter, contract):
    wanted = {name: value.clone() for name, value in drafter.state_dict().items()}
    noise = torch.get_rng_state()
    torch.rand(5)
    for parameter in drafter.parameters():
        parameter.data.fill_(float("nan"))
    assert checkpoint.find(saved) == saved
    checkpoint.load_weights(saved, drafter)
    assert all(value.equal(wanted[name]) for name, value in drafter.state_dict().items())
    assert checkpoint.load_progress(saved, contract, PROGRESS.run) == PROGRESS
    found = checkpoint.load_optimizer(saved, 0, 1)
    assert found.keys() == MOMENTS.keys() and all(found[k].equal(v) for k, v in MOMENTS.items())
    assert torch.get_rng_state().equal(noise)
    assert sorted(p.name for p in saved.parent.iterdir()) == ["last"]


def test_saved_weights_are_copies(drafter):
    weights = checkpoint.weights_of(drafter)
    drafter.fc.weight.data.zero_()
    assert weights["fc.weight"].abs().sum() > 0


def test_nothing_there_is_none_and_damage_is_named(saved, tmp_path):
    assert checkpoint.find(tmp_path / "nowhere") is None
    (saved / "state.json").write_text("{}")
    with pytest.raises(ArtifactError, match="state.json"):
        checkpoint.find(saved)


def test_weights_only_folder_cannot_be_resumed(tmp_path, drafter, contract):
    checkpoint.save(tmp_path / "best", checkpoint.weights_of(drafter), PROGRESS, contract, None)
    checkpoint.load_weights(tmp_path / "best", drafter)
    with pytest.raises(ArtifactError, match="weights only.*init_from"):
        checkpoint.load_optimizer(tmp_path / "best", 0, 1)


def test_another_number_of_ranks_is_refused(saved):
    with pytest.raises(ContractError, match="world_size=1 processes, this run has 2.*nproc_per_node 1"):
        checkpoint.load_optimizer(saved, 0, 2)


def test_another_setting_is_refused_by_name(saved, contract):
    with pytest.raises(ContractError, match=r"trainer.seed=0, this run has 3"):
        checkpoint.load_progress(saved, contract, {**PROGRESS.run, "trainer.seed": 3})
    with pytest.raises(ContractError, match=r"trainer.new='absent', this run has 1"):
        checkpoint.load_progress(saved, contract, {**PROGRESS.run, "trainer.new": 1})
    with pytest.raises(ContractError, match=r"trainer.seed=0, this run has 'absent'"):
        checkpoint.load_progress(saved, contract, {"trainer.betas": [0.9, 0.95]})


def test_another_target_is_refused_by_name(saved, contract):
    other = dataclasses.replace(contract, tokenizer_sha256="0" * 64)
    with pytest.raises(ContractError, match="tokenizer_sha256"):
        checkpoint.load_progress(saved, other, PROGRESS.run)


@pytest.mark.parametrize("change", ["missing", "unknown", "misshapen"])
def test_wrong_tensors_are_named(saved, drafter, change):
    weights = checkpoint.weights_of(drafter)
    if change == "missing":
        del weights["norm.weight"]
    elif change == "unknown":
        weights["extra.weight"] = torch.zeros(1)
    else:
        weights["norm.weight"] = torch.zeros(3)
    save_file(weights, saved / checkpoint.WEIGHTS)
    name = "extra.weight" if change == "unknown" else "norm.weight"
    with pytest.raises(ArtifactError, match=name):
        checkpoint.load_weights(saved, drafter)


@pytest.mark.parametrize("point", ["save_file", "_seal", "_swap"])
def test_a_kill_while_saving_leaves_the_previous_checkpoint(saved, drafter, contract, monkeypatch, point):
    class Killed(BaseException):
        pass

    def kill(*_, **__):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoint if point == "save_file" else artifacts, point, kill)
        later = dataclasses.replace(PROGRESS, step=9)
        checkpoint.save(saved, checkpoint.weights_of(drafter), later, contract, MOMENTS)
    assert checkpoint.find(saved) == saved
    assert checkpoint.load_progress(saved, contract, PROGRESS.run).step == 7
    checkpoint.save(saved, checkpoint.weights_of(drafter), dataclasses.replace(PROGRESS, step=9), contract, MOMENTS)
    assert checkpoint.load_progress(saved, contract, PROGRESS.run).step == 9
    assert sorted(p.name for p in saved.parent.iterdir()) == ["last"]
