"""The loop: exact denominators, resuming bit for bit, stopping, refusing bad numbers, learning."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafters import engine as engine_module
from drafters import trainer as trainer_module
from drafters.batches import Batches
from drafters.corpus import ResponseRecord
from drafters.errors import ArtifactError, ContractError
from drafters.features import OnlineFeatures
from drafters.schedule import depth_at, hold_out, learning_rate
from drafters.trainer import TrainingError
from tests.drafters.training_setup import make_records, run_settings, run_training

ROOT = Path(__file__).resolve().parents[2]
RECORDS = make_records(12)


def metrics(out_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]


def moments(out_dir: Path, world_size: int = 1) -> dict[str, torch.Tensor]:
    """First moments in rank 0's last checkpoint; after one step they are a tenth of the clipped gradient."""
    found = load_file(out_dir / f"checkpoints/last/optimizer-00000-of-{world_size:05d}.safetensors")
    return {name: value for name, value in found.items() if name.endswith("exp_avg")}


def assert_same_weights(one, other) -> None:
    for (name, mine), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert mine.equal(theirs), name


# ---- schedules


def test_learning_rate_warms_up_and_decays_to_its_floor():
    cfg = run_settings_stub(learning_rate=1.0, warmup_ratio=0.1, min_lr_ratio=0.1)
    rates = [learning_rate(step, 100, cfg) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates[99] == pytest.approx(0.1, abs=1e-3)


def run_settings_stub(**values):
    from drafters.config import TrainerConfig

    return TrainerConfig(**values)


@pytest.mark.parametrize(
    ("curriculum", "expected"),
    [([0.35, 0.6], {0: 1, 34: 1, 35: 3, 59: 3, 60: 5, 99: 5}), ([], {0: 5, 99: 5}), ([0.5], {49: 1, 50: 5})],
)
def test_depth_follows_the_curriculum(curriculum, expected):
    from drafters.config import Eagle3Config

    cfg = Eagle3Config(ttt_steps=5, curriculum=curriculum)
    assert {step: depth_at(step, 100, cfg) for step in expected} == expected


def test_held_out_records_are_a_fixed_twentieth():
    records = make_records(60)
    trained, held = hold_out(records)
    assert len(held) == 3 and len(trained) == 57
    assert hold_out(list(reversed(records)))[1] == list(reversed(held))
    assert hold_out(make_records(12))[1] == []


# ---- denominators


def test_two_micro_batches_equal_one_of_two_rows(tiny_target, tmp_path, monkeypatch):
    cfg = run_settings(tiny_target, max_steps=1)
    run_training(tiny_target, RECORDS, cfg, tmp_path / "2x1")
    monkeypatch.setattr(trainer_module, "Batches", functools.partial(Batches, rows_per_batch=2))
    run_training(tiny_target, RECORDS, cfg, tmp_path / "1x2")
    one, two = moments(tmp_path / "2x1"), moments(tmp_path / "1x2")
    assert one.keys() == two.keys() and max(float(g.abs().max()) for g in one.values()) > 1e-4
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-6)
    assert metrics(tmp_path / "2x1")[0]["train/loss"] == pytest.approx(metrics(tmp_path / "1x2")[0]["train/loss"])


def test_gradient_is_the_sum_over_the_global_count(tiny_target, tmp_path, monkeypatch):
    """Recomputes one step of two uneven micro-batches by hand, without DeepSpeed."""
    cfg = run_settings(tiny_target, max_steps=1, clip_grad=1e9)
    seen = {}
    real = trainer_module.Trainer._take_step

    def spy(self):
        from drafters.models.layout import make_layout

        model = self.engine.module
        layouts = [make_layout(batch, 2) for batch in self.batches.step(0)]
        sums = [model(layout, self.features(b, layout))[0] for b, layout in
                zip(self.batches.step(0), layouts, strict=True)]  # fmt: skip
        count = sum(layout.counts()[0] + 0.8 * layout.counts()[1] for layout in layouts)
        assert len({layout.counts()[0] for layout in layouts}) == 2
        parameters = [p for p in model.parameters() if p.dim() > 1]
        seen["wanted"] = torch.autograd.grad(sum(sums) / count, parameters)
        return real(self)

    monkeypatch.setattr(trainer_module.Trainer, "_take_step", spy)
    run_training(tiny_target, RECORDS, cfg, tmp_path)
    found = moments(tmp_path)
    for index, wanted in enumerate(seen["wanted"]):
        torch.testing.assert_close(found[f"{index}.exp_avg"], 0.1 * wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_two_ranks_of_two_micro_batches_equal_one_of_four(tiny_target, tmp_path):
    cfg = run_settings(tiny_target, max_steps=1, tokens_per_step=160)
    run_training(tiny_target, RECORDS, cfg, tmp_path / "one")
    script = "from tests.drafters.training_ranks import main; main()"
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(engine_module._free_port()), "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "RANKS_TARGET": str(tiny_target.folder), "RANKS_OUT": str(tmp_path), "RANKS_STAGES": "0 2 3",
    }  # fmt: skip
    ranks = [
        subprocess.Popen([sys.executable, "-c", script], env=environment | {"RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(2)
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    one = metrics(tmp_path / "one")[0]
    for stage in ("0", "2", "3"):
        two = metrics(tmp_path / stage)[0]
        for name in ("train/loss", "train/grad_norm", "train/acc_0", "train/acc_1"):
            assert two[name] == pytest.approx(one[name], rel=1e-5), (stage, name)
    mine, theirs = moments(tmp_path / "one"), moments(tmp_path / "0", world_size=2)
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=1e-6)


# ---- resuming


class Killed(BaseException):
    """Stands for a kill: nothing may catch it."""


@pytest.mark.parametrize("features", ["online", "cached"])
def test_twenty_steps_equal_ten_kill_ten(tiny_target, tmp_path, features):
    def kill_at_15(_):
        raise Killed

    cfg = run_settings(tiny_target, max_steps=20, save_every=10, features=features)
    whole, _ = run_training(tiny_target, RECORDS, cfg, tmp_path / "whole")
    halves = run_settings(tiny_target, max_steps=20, save_every=10, eval_every=15, features=features)
    with pytest.raises(Killed):
        run_training(tiny_target, RECORDS, halves, tmp_path / "halves", kill_at_15)
    resumed, result = run_training(tiny_target, RECORDS, cfg_like(halves, 1000), tmp_path / "halves")
    assert result.step == 20 and not result.stopped
    assert_same_weights(whole, resumed)
    for name in os.listdir(tmp_path / "whole/checkpoints/last"):
        if name.endswith(".safetensors"):
            one = load_file(tmp_path / "whole/checkpoints/last" / name)
            two = load_file(tmp_path / "halves/checkpoints/last" / name)
            assert all(one[key].equal(two[key]) for key in one), name
    losses = [[m["train/loss"] for m in metrics(tmp_path / run)] for run in ("whole", "halves")]
    assert losses[0] == losses[1] and len(losses[0]) == 20


def cfg_like(cfg, eval_every):
    """The same run watched at another cadence, which resuming must allow."""
    import dataclasses

    return dataclasses.replace(cfg, trainer=dataclasses.replace(cfg.trainer, eval_every=eval_every))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_resuming_is_exact_at_every_zero_stage(tiny_target, tmp_path, stage):
    cfg = run_settings(tiny_target, max_steps=4, save_every=2, zero_stage=stage)
    whole, _ = run_training(tiny_target, RECORDS, cfg, tmp_path / "whole")

    def kill_at_3(_):
        raise Killed

    with pytest.raises(Killed):
        run_training(tiny_target, RECORDS, cfg_like(cfg, 3), tmp_path / "halves", kill_at_3)
    resumed, _ = run_training(tiny_target, RECORDS, cfg, tmp_path / "halves")
    assert_same_weights(whole, resumed)


def test_a_finished_run_is_not_trained_again(tiny_target, tmp_path):
    cfg = run_settings(tiny_target)
    first, _ = run_training(tiny_target, RECORDS, cfg, tmp_path)
    again, result = run_training(tiny_target, RECORDS, cfg, tmp_path)
    assert result.step == 4 and not result.stopped
    assert_same_weights(first, again)
    assert len(metrics(tmp_path)) == 4


def test_resume_never_starts_over(tiny_target, tmp_path):
    first, _ = run_training(tiny_target, RECORDS, run_settings(tiny_target), tmp_path)
    again, _ = run_training(tiny_target, RECORDS, run_settings(tiny_target, resume="never"), tmp_path)
    assert_same_weights(first, again)
    assert [m["step"] for m in metrics(tmp_path)] == [1, 2, 3, 4]


def test_another_setting_data_or_damage_is_refused_by_name(tiny_target, tmp_path):
    run_training(tiny_target, RECORDS, run_settings(tiny_target), tmp_path)
    with pytest.raises(ContractError, match=r"trainer.learning_rate=0.01, this run has 0.02.*resume=never"):
        run_training(tiny_target, RECORDS, run_settings(tiny_target, learning_rate=0.02), tmp_path)
    with pytest.raises(ContractError, match="ttt_steps"):
        run_training(tiny_target, RECORDS, run_settings(tiny_target, drafter={"ttt_steps": 3}), tmp_path)
    changed = [*RECORDS[:-1], ResponseRecord(**{**RECORDS[-1].__dict__, "response_ids": [5] * 20})]
    with pytest.raises(ContractError, match="draft_vocab_sha256|training records"):
        run_training(tiny_target, changed, run_settings(tiny_target), tmp_path)
    weights = tmp_path / "checkpoints/last/drafter.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ArtifactError, match="drafter.safetensors"):
        run_training(tiny_target, RECORDS, run_settings(tiny_target), tmp_path)


# ---- stopping


def test_first_signal_saves_then_stops_and_the_run_goes_on_later(tiny_target, tmp_path):
    def interrupt(_):
        os.kill(os.getpid(), signal.SIGINT)
        return {"acceptance_length": 1.0}

    before = signal.getsignal(signal.SIGINT)
    cfg = run_settings(tiny_target, max_steps=6, eval_every=2)
    _, result = run_training(tiny_target, RECORDS, cfg, tmp_path, interrupt)
    assert result.stopped and result.step == 3
    assert json.loads((tmp_path / "checkpoints/last/state.json").read_text())["step"] == 3
    assert signal.getsignal(signal.SIGINT) is before
    resumed, result = run_training(tiny_target, RECORDS, cfg_like(cfg, 1000), tmp_path)
    assert result.step == 6 and not result.stopped
    whole, _ = run_training(tiny_target, RECORDS, cfg_like(cfg, 1000), tmp_path / "whole")
    assert_same_weights(whole, resumed)


def test_second_signal_stops_at_once(tiny_target, tmp_path):
    def interrupt_twice(_):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        run_training(tiny_target, RECORDS, run_settings(tiny_target, eval_every=2), tmp_path, interrupt_twice)
    assert not (tmp_path / "checkpoints/last").exists()


# ---- numbers


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_non_finite_features_stop_the_run_and_name_the_records(tiny_target, tmp_path, monkeypatch, stage):
    real = OnlineFeatures.__call__

    def poisoned(self, batch, layout, later):
        features = real(self, batch, layout, later)
        if any("record-3" in row for row in batch.record_ids):
            features.taps[0, 0] = float("nan")
        return features

    monkeypatch.setattr(OnlineFeatures, "__call__", poisoned)
    cfg = run_settings(tiny_target, max_steps=20, save_every=1, zero_stage=stage)
    with pytest.raises(TrainingError, match=r"step \d+: the loss is not finite.*record-3") as error:
        run_training(tiny_target, RECORDS, cfg, tmp_path)
    named = str(error.value).split(": ")[2].split(".")[0].split(", ")
    assert len(named) <= 3  # the row with record 3, not the whole step
    if (tmp_path / "checkpoints/last").exists():
        weights = load_file(tmp_path / "checkpoints/last/drafter.safetensors")
        assert all(bool(torch.isfinite(w).all()) for w in weights.values() if w.is_floating_point())


def test_non_finite_gradient_alone_stops_before_the_weights_change(tiny_target, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module.engine, "gradient_norm", lambda _: torch.tensor(float("inf")))
    with pytest.raises(TrainingError, match="step 1: the gradient is not finite"):
        run_training(tiny_target, RECORDS, run_settings(tiny_target), tmp_path)


# ---- learning


def test_one_text_is_learnt_by_heart(tiny_target, tmp_path, monkeypatch):
    real = OnlineFeatures.__init__

    def sharper(self, *args):
        real(self, *args)
        self.head = self.head * 30  # the random target is nearly undecided; its choices stay the same

    monkeypatch.setattr(OnlineFeatures, "__init__", sharper)
    record = make_records(1, prompt=8, response=40)
    cfg = run_settings(
        tiny_target, max_steps=80, tokens_per_step=40, log_every=5, warmup_ratio=0.1, drafter={"draft_vocab_size": 512}
    )
    run_training(tiny_target, record, cfg, tmp_path)
    last = metrics(tmp_path)[-1]
    assert last["train/acc_0"] >= 0.9 and last["train/acc_1"] >= 0.9


def test_frozen_head_stays_and_a_trained_one_moves(tiny_target, tmp_path):
    frozen = run_settings(tiny_target, drafter={"train_lm_head": False})
    head = tiny_target.head_weight
    drafter, _ = run_training(tiny_target, RECORDS, frozen, tmp_path / "frozen")
    assert drafter.lm_head.weight.equal(head[drafter.t2d])
    drafter, _ = run_training(tiny_target, RECORDS, run_settings(tiny_target), tmp_path / "trained")
    assert not drafter.lm_head.weight.equal(head[drafter.t2d])


def test_the_target_is_untouched(tiny_target, tmp_path):
    before = {name: value.clone() for name, value in tiny_target.model.state_dict().items()}
    run_training(tiny_target, RECORDS, run_settings(tiny_target), tmp_path)
    assert all(value.equal(before[name]) for name, value in tiny_target.model.state_dict().items())
    assert all(p.grad is None for p in tiny_target.model.parameters())


# ---- watching


def test_evaluation_decides_the_best_checkpoint_and_is_logged(tiny_target, tmp_path):
    lengths = iter([1.5, 2.5, 2.0])
    copies = []

    def evaluate(drafter):
        copies.append(drafter.fc.weight.detach().clone())
        return {"acceptance_length": next(lengths), "acceptance_at": [0.5, 0.25]}

    records = make_records(40)
    cfg = run_settings(tiny_target, max_steps=6, eval_every=2)
    drafter, result = run_training(tiny_target, records, cfg, tmp_path, evaluate)
    assert (result.best_value, result.best_step) == (2.5, 4)
    best = load_file(tmp_path / "checkpoints/best/drafter.safetensors")
    assert best["fc.weight"].equal(copies[1]) and not best["fc.weight"].equal(drafter.fc.weight)
    evaluated = [m for m in metrics(tmp_path) if "eval/acceptance_length" in m]
    assert [m["eval/acceptance_length"] for m in evaluated] == [1.5, 2.5, 2.0]
    assert evaluated[0]["eval/acceptance_at_1"] == 0.5 and evaluated[0]["eval/acceptance_at_2"] == 0.25
    for m in evaluated:
        assert 1.0 <= m["eval/simulated_acceptance_length"] <= 1.0 + m["eval/acc_0"] + m["eval/acc_1"]


def test_every_step_is_logged_with_the_documented_names(tiny_target, tmp_path):
    run_training(tiny_target, RECORDS, run_settings(tiny_target, max_steps=2), tmp_path)
    names = {"train/loss", "train/acc_0", "train/acc_1", "train/lr", "train/grad_norm", "train/ttt_steps",
             "perf/tokens_per_s", "perf/tokens_per_cpu_s", "step", "time"}  # fmt: skip
    assert [set(m) for m in metrics(tmp_path)] == [names, names]
