"""Medusa-2: its loss against the definition, where gradients flow, its schedule, resuming, its settings."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from drafters.batches import collate
from drafters.config import TargetConfig
from drafters.config_drafter import Medusa2Config
from drafters.drift import measure_drift
from drafters.engine import parameter_groups, set_learning_rate
from drafters.errors import ConfigError, ContractError
from drafters.facts import known_facts
from drafters.features import BatchInputs, OnlineFeatures
from drafters.logger import Logger
from drafters.losses import self_distillation
from drafters.models import Medusa2Drafter
from drafters.models.heads import HeadsTraining
from drafters.plan import drafter_parameters, make_plan
from drafters.target import Target
from drafters.trainer import train
from tests.drafters.training_setup import make_records, new_drafter, run_settings, run_training
from tests.helpers import complaint, settings

RECORDS = make_records(12)


@pytest.fixture(scope="module")
def fresh(tiny_target, tiny_config) -> Target:
    """A target that no engine has touched, in the same cache."""
    return Target.load(tiny_config)


def medusa2(target: Target, **options):
    """Settings of a run whose adapter trains from the start, without dropout, unless told otherwise."""
    usual = {"draft_vocab_size": 300, "num_heads": 2, "lora_rank": 4, "lora_dropout": 0.0, "heads_warmup": 0.0}
    names = {field.name for field in dataclasses.fields(Medusa2Config)}
    own = {name: value for name, value in options.items() if name in names}
    rest = {name: value for name, value in options.items() if name not in names}
    return run_settings(target, drafter=Medusa2Config(**usual | own), **rest)


def wild(target: Target, cfg, scale: float = 0.05) -> Medusa2Drafter:
    """Random heads and factors, so that the adapter changes what the target says."""
    drafter = new_drafter(target, RECORDS, cfg)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * (scale if "lora" in name else 0.1))
    return drafter


def laid_out(drafter: Medusa2Drafter, target: Target, steps: int = 2):
    batch = collate(RECORDS, [(0, 1)], 64)
    layout = drafter.layout(batch, steps)
    return batch, layout, BatchInputs(target.device)(batch, layout)


# ---- the loss


def test_self_distillation_is_kl_and_its_gradient():
    torch.manual_seed(0)
    hidden, original = torch.randn(2, 5, 8, dtype=torch.float64).unbind()
    head = torch.randn(30, 8, dtype=torch.float64)
    hidden.requires_grad_()
    log_p, log_q = ((rows @ head.T).log_softmax(-1) for rows in (original, hidden))
    wanted = (log_p.exp() * (log_p - log_q)).sum()
    (gradient,) = torch.autograd.grad(3 * wanted, hidden)
    kl, choice, agreed = self_distillation(hidden, original, head)
    (found,) = torch.autograd.grad(3 * kl, hidden)
    torch.testing.assert_close(kl, wanted)
    torch.testing.assert_close(found, gradient)
    assert choice.equal(log_q.argmax(-1)) and int(agreed) == int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
    assert not choice.requires_grad
    assert float(self_distillation(original, original, head)[0]) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_loss_is_its_definition(fresh, training):
    cfg = medusa2(fresh, kl_weight=0.7, heads_weight=0.3, heads_schedule="linear", heads_warmup=0.2)
    drafter = wild(fresh, cfg)
    batch, layout, inputs = laid_out(drafter, fresh)
    graph = drafter.training_graph(cfg.drafter, fresh).train(training)
    graph.progress = 0.6
    loss, stats = graph(layout, inputs)
    tuned = drafter.tuned(fresh)
    features = OnlineFeatures(tuned, (8,), drafter.t2d, torch.float32)(batch, layout)
    heads, wanted_stats = HeadsTraining(drafter, 0.8, cfg.drafter.loss)(layout, features)
    log_p, log_q = (
        target.model(inputs.ids, position_ids=inputs.position_ids, attention_mask=inputs.mask).logits[0]
        .log_softmax(-1)[layout.teacher]
        for target in (fresh, tuned)
    )  # fmt: skip
    kl = (log_p.exp() * (log_p - log_q)).sum()
    assert kl > 0.1
    torch.testing.assert_close(loss, 0.7 * kl + 0.5 * 0.3 * heads, rtol=1e-4, atol=0)
    torch.testing.assert_close(stats[:4], wanted_stats, rtol=1e-4, atol=1e-3)
    same, count = (log_p.argmax(-1) == log_q.argmax(-1)).sum(), len(layout.teacher)
    torch.testing.assert_close(stats[4:, 0], torch.tensor([kl, count, same, count]), rtol=1e-4, atol=1e-4)
    assert not stats[4:, 1:].any()


def test_the_loss_is_a_mean_over_response_tokens(fresh):
    cfg = medusa2(fresh)
    drafter = new_drafter(fresh, RECORDS, cfg)
    _, layout, _ = laid_out(drafter, fresh)
    assert drafter.loss_counts(layout) == [len(RECORDS[0].response_ids) + len(RECORDS[1].response_ids), 0]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1, 1, 1, 1]),
        ("linear", [1, 0, 0.5, 0.75]),
        ("sine", [1, 0, math.sqrt(0.5), math.sin(0.375 * math.pi)]),
    ],
)
def test_heads_come_in_by_the_schedule_of_the_joint_training(fresh, schedule, expected):
    cfg = medusa2(fresh, heads_schedule=schedule, heads_warmup=0.2)
    graph = new_drafter(fresh, RECORDS, cfg).training_graph(cfg.drafter, fresh)
    for progress, share in zip([0.1, 0.2, 0.6, 0.8], expected, strict=True):
        graph.progress = progress
        assert graph.heads_share == pytest.approx(share)


# ---- what trains


def test_gradients_reach_heads_and_factors_and_nothing_else(fresh):
    cfg = medusa2(fresh, heads_warmup=0.5)
    drafter = wild(fresh, cfg)
    _, layout, inputs = laid_out(drafter, fresh)
    graph = drafter.training_graph(cfg.drafter, fresh)
    assert [name for name, _ in graph.named_parameters()] == [f"drafter.{n}" for n, _ in drafter.named_parameters()]
    for progress, together in ((0.49, False), (0.5, True)):
        graph.progress = progress
        graph.zero_grad()
        _, stats = graph(layout, inputs)
        graph(layout, inputs)[0].backward()
        for name, parameter in drafter.named_parameters():
            learns = name != "lm_head.weight" and (together or "lora" not in name)
            assert (parameter.grad is not None and bool(parameter.grad.any())) is learns, name
        assert bool(stats[5, 0]) is together
    assert not any(parameter.grad is not None or parameter.requires_grad for parameter in fresh.model.parameters())


def test_the_heads_alone_learn_during_the_warm_up(fresh, tmp_path):
    cfg = medusa2(fresh, heads_warmup=0.5, max_steps=4, eval_every=2, weight_decay=0.1)
    seen = []

    def evaluate(drafter):
        seen.append({name: value.clone() for name, value in drafter.own_state().items()})
        return {"acceptance_length": 1.0}

    before = new_drafter(fresh, RECORDS, cfg).own_state()
    run_training(fresh, RECORDS, cfg, tmp_path, evaluate)
    lora = [name for name in before if name.startswith("lora.")]
    assert len(lora) == 8 * 7 * 2
    assert all(seen[0][name].equal(before[name]) for name in lora)
    assert not any(seen[1][name].equal(before[name]) for name in lora)
    for first, second in (before, seen[0]), seen:
        assert not any(first[name].equal(second[name]) for name in before if name.startswith("heads."))
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert ["train/kl" in row for row in logged if "train/loss" in row] == [False, False, True, True]


def test_both_parts_of_the_loss_fall_and_the_target_stays(fresh, tmp_path):
    before = {name: weight.clone() for name, weight in fresh.model.state_dict().items()}
    cfg = medusa2(fresh, max_steps=8, learning_rate=5e-3, tokens_per_step=40)
    drafter = wild(fresh, cfg)
    console = Console(file=io.StringIO())
    train(drafter, fresh, RECORDS, cfg, tmp_path, None, Logger(tmp_path, cfg.logger), console)
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for name in ("train/loss", "train/kl"):
        assert logged[-1][name] < 0.9 * logged[0][name], name
    assert logged[-1]["train/agreement"] > logged[0]["train/agreement"]
    assert all(weight.equal(before[name]) for name, weight in fresh.model.state_dict().items())
    kept = load_file(tmp_path / "checkpoints/last/drafter.safetensors")
    assert {name.split(".")[0] for name in kept} == {"d2t", "t2d", "heads", "lora"}


def test_learning_rates_follow_their_group(fresh):
    cfg = medusa2(fresh, heads_warmup=0.3, heads_lr_multiplier=5.0)
    drafter = new_drafter(fresh, RECORDS, cfg)
    groups = parameter_groups(drafter.training_graph(cfg.drafter, fresh), 0.1, drafter.rate_group)
    described = [(group["rate_group"], group["weight_decay"], len(group["params"])) for group in groups]
    assert described == [("adapter", 0.1, 8 * 7 * 2), ("heads", 0.1, 2), ("heads", 0.0, 2)]
    engine = SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups))
    for progress, expected in ((0.29, [0.0, 1.0, 1.0]), (0.3, [0.2, 1.0, 1.0])):
        set_learning_rate(engine, 0.2, drafter.rates(cfg.drafter, progress))
        assert [group["lr"] for group in groups] == pytest.approx(expected)


# ---- runs


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [(0, "float32"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, "float32"), (1, "bfloat16")))],
)
def test_resuming_is_exact(fresh, tmp_path, stage, dtype):
    """Five steps and five more, with dropout and the warm-up's end in between."""
    usual = {
        "zero_stage": stage, "dtype": dtype, "lora_dropout": 0.1, "heads_warmup": 0.3, "max_steps": 10, "save_every": 5,
        "tokens_per_step": 40, "lora_targets": ["q_proj"],
    }  # fmt: skip
    cfg = medusa2(fresh, **usual)
    whole, _ = run_training(fresh, RECORDS, cfg, tmp_path / "whole")

    class Killed(Exception):
        pass

    def kill(_):
        raise Killed

    with pytest.raises(Killed):
        run_training(fresh, RECORDS, medusa2(fresh, eval_every=7, **usual), tmp_path / "h", kill)
    assert json.loads((tmp_path / "h/checkpoints/last/state.json").read_text())["step"] == 5
    resumed, _ = run_training(fresh, RECORDS, cfg, tmp_path / "h")
    start = new_drafter(fresh, RECORDS, cfg).own_state()
    for name, value in whole.own_state().items():
        assert value.equal(resumed.own_state()[name]), name
        assert name in ("d2t", "t2d") or not value.equal(start[name]), name


# ---- what it says of itself


def test_drift_equals_a_direct_computation(fresh):
    cfg = medusa2(fresh)
    drafter = wild(fresh, cfg, 0.005)
    tuned, held = drafter.tuned(fresh), RECORDS[:3]
    drift = measure_drift(fresh, tuned, held, 20)
    kl, same, count = 0.0, 0, 0
    for record in held:
        ids = torch.tensor([(record.prompt_ids + record.response_ids)[:20]])
        with torch.no_grad():
            said = (target.model(ids).logits[0].log_softmax(-1) for target in (fresh, tuned))
            log_p, log_q = (rows[len(record.prompt_ids) - 1 : -1] for rows in said)
        kl += float((log_p.exp() * (log_p - log_q)).sum())
        same, count = same + int((log_p.argmax(-1) == log_q.argmax(-1)).sum()), count + len(log_p)
    assert drift == {
        "records": 3, "positions": count, "kl": pytest.approx(kl / count, rel=1e-4), "top1_agreement": same / count,
    }  # fmt: skip
    assert 0 < drift["top1_agreement"] < 1 and drift["kl"] > 0.01
    none = measure_drift(fresh, fresh, held, 20)
    assert none["top1_agreement"] == 1 and none["kl"] == pytest.approx(0, abs=1e-6)
    assert measure_drift(fresh, tuned, [], 20) == {"records": 0, "positions": 0, "kl": None, "top1_agreement": None}


def test_factors_come_with_a_tuned_target(fresh):
    cfg = medusa2(fresh)
    drafter = wild(fresh, cfg)
    tuned = drafter.tuned(fresh)
    other = new_drafter(fresh, RECORDS, cfg).bfloat16()
    other.bind(tuned)
    for name, factor in other.lora.items():
        assert factor.equal(drafter.lora[name]) and factor.dtype == torch.float32
    assert other.tuned(tuned) is tuned and other.tuned(fresh).adapter.sha256 == tuned.adapter.sha256
    wider = new_drafter(fresh, RECORDS, medusa2(fresh, lora_rank=5))
    with pytest.raises(ContractError, match=r"adapter without .*q_proj.lora_A.weight of \[5, 64\]"):
        wider.bind(tuned)


def test_the_plan_counts_what_the_module_has():
    run = settings("train", "drafter=medusa2", "drafter.lora_targets=[q_proj,down_proj]", "target=tiny-random",
                   "drafter.draft_vocab_size=256")  # fmt: skip
    facts = known_facts(run.target)
    for targets, count in ((["q_proj", "down_proj"], 2), (None, 7)):
        cfg = dataclasses.replace(run.drafter, lora_targets=targets)
        sizes = {
            "self_attn.q_proj": [64, 64], "self_attn.k_proj": [32, 64], "self_attn.v_proj": [32, 64],
            "self_attn.o_proj": [64, 64], "mlp.gate_proj": [128, 64], "mlp.up_proj": [128, 64],
            "mlp.down_proj": [64, 128],
        }  # fmt: skip
        kept = {n: s for n, s in sizes.items() if targets is None or n.rpartition(".")[2] in targets}
        assert len(kept) == count
        shape = Medusa2Drafter.shape_type(64, 512, 256, 4, 1, False, 32, 16, 0.05, 8, kept)
        with torch.device("meta"):
            drafter = Medusa2Drafter(shape)
        everything = sum(parameter.numel() for parameter in drafter.parameters())
        assert drafter_parameters(cfg, facts) == (everything, everything - 256 * 64)
    plan = make_plan(run)
    row_tokens = plan["work"]["target_forward_flops"] / 2 / plan["target_parameters"]
    frozen = make_plan(settings("train", "drafter=medusa", "target=tiny-random", "drafter.draft_vocab_size=256"))
    assert row_tokens == pytest.approx(2.6 * frozen["work"]["target_forward_flops"] / 2 / plan["target_parameters"])
    assert plan["feature_bytes"] == 0
    activations = [p["memory_per_device_bytes"][0]["activations"] for p in (plan, frozen)]
    assert activations[0] > 3 * activations[1]


# ---- refusals


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.features=cached", "drafter=medusa2 trains the target too. Set trainer.features=online."),
        ("deepspeed=zero3", "deepspeed.zero_stage=3 scatters weights, but those of drafter=medusa2's adapter"),
        ("drafter.lora_targets=[]", "drafter.lora_targets=[] tunes nothing"),
        ("drafter.lora_rank=0", "drafter.lora_rank=0: must be a whole number >= 1"),
        ("drafter.lora_alpha=0", "drafter.lora_alpha=0: must be"),
        ("drafter.lora_dropout=1", "drafter.lora_dropout=1"),
        ("drafter.kl_weight=0", "drafter.kl_weight=0"),
        ("drafter.heads_weight=0", "drafter.heads_weight=0"),
        ("drafter.heads_schedule=cosine", "drafter.heads_schedule=cosine: must be one of constant, linear, sine"),
        ("drafter.heads_warmup=1", "drafter.heads_warmup=1"),
        ("drafter.heads_lr_multiplier=0", "drafter.heads_lr_multiplier=0"),
        ("drafter.ttt_steps=3", "drafter=medusa2 has no key 'ttt_steps'"),
    ],
)
def test_settings_that_cannot_be_are_refused(override, words):
    assert words in complaint("train", "drafter=medusa2", override)


def test_a_layer_the_target_lacks_is_refused(fresh):
    with pytest.raises(ConfigError, match="drafter.lora_targets names 'query'"):
        Medusa2Drafter.shape_for(Medusa2Config(lora_targets=["query"]), fresh)


def test_the_settings_have_their_defaults():
    run = settings("train", "drafter=medusa2")
    assert run.drafter == dataclasses.replace(Medusa2Config(), draft_vocab_size=12288)
    assert isinstance(run.target, TargetConfig) and run.trainer.features == "online"
