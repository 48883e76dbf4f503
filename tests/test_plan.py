"""plan=true: exact counts against real modules, hand-computed estimates, facts checked against config.json."""

from __future__ import annotations

import io
import json
import math
import socket
import time
from dataclasses import asdict

import pytest
from rich.console import Console

from drafters import facts as target_facts
from drafters import plan as planning
from drafters.config import Eagle3Config, TargetConfig
from drafters.errors import TargetError
from drafters.facts import CONFIG_NAMES, facts_from, known_facts, read_facts
from drafters.plan import drafter_parameters, make_plan, memory_rows, run_plan, target_parameters
from drafters.plan_families import mean_depth
from tests.helpers import settings

GIB = 2**30


def facts_of(name: str):
    return settings("train", f"target={name}").target.facts


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """The hub answers nobody; a test that wants it puts its own answer in place."""

    def refuse(*args, **kwargs):
        raise OSError("no network in tests")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", refuse)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args, **kwargs: None)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


# ---- counts


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("smollm2-135m", 134_515_008),
        ("llama3-8b", 8_030_261_248),
        ("llama3.1-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("vicuna-7b", 6_738_415_616),
        # Qwen3 adds two norms of head_dim per layer, which the count leaves out.
        ("qwen3-8b", 8_190_735_360 - 36 * 2 * 128),
        ("qwen3-32b", 32_762_123_264 - 64 * 2 * 128),
    ],
)
def test_target_parameters_are_the_published_counts(name, published):
    assert target_parameters(facts_of(name)) == published


@pytest.mark.parametrize("tied", [False, True])
def test_target_parameters_match_a_real_llama(tied):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=99,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    facts = facts_from(config.to_dict(), TargetConfig(name="x", path="x"))
    assert target_parameters(facts) == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fc_norm": True},
        {"train_lm_head": False},
        {"hidden_size": 32, "intermediate_size": 40, "num_heads": 8, "num_kv_heads": 2, "head_dim": 12},
    ],
)
def test_drafter_parameters_match_the_real_module(changes):
    import torch

    from drafters.models.eagle3 import Eagle3Drafter, Eagle3Shape

    cfg = Eagle3Config(draft_vocab_size=100, **changes)
    facts = known_facts(settings("train", "target=tiny-random", "drafter.draft_vocab_size=100").target)
    pick = {name: getattr(cfg, name) or getattr(facts, name) for name in
            ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")}  # fmt: skip
    shape = Eagle3Shape(
        **pick,
        target_hidden_size=facts.hidden_size,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position_embeddings=64,
        vocab_size=facts.vocab_size,
        draft_vocab_size=100,
        fc_norm=cfg.fc_norm,
    )
    with torch.device("meta"):
        drafter = Eagle3Drafter(shape)
    counted, trained = drafter_parameters(cfg, facts)
    assert counted == sum(weight.numel() for weight in drafter.parameters())
    assert trained == counted - (0 if cfg.train_lm_head else drafter.lm_head.weight.numel())


@pytest.mark.parametrize(
    ("steps", "curriculum", "depth"),
    [
        (5, [0.35, 0.6], 1 * 0.35 + 3 * 0.25 + 5 * 0.4),
        (5, [], 5.0),
        (4, [0.5], 1 * 0.5 + 4 * 0.5),
        (1, [0.35, 0.6], 1.0),
    ],
)
def test_mean_depth_follows_the_curriculum(steps, curriculum, depth):
    assert mean_depth(Eagle3Config(ttt_steps=steps, curriculum=curriculum)) == pytest.approx(depth)


def test_mean_depth_is_the_trainers_own_schedule():
    from drafters.trainer import depth_at

    for cfg in (Eagle3Config(), Eagle3Config(ttt_steps=7, curriculum=[0.2, 0.4, 0.8]), Eagle3Config(curriculum=[])):
        walked = sum(depth_at(step, 1000, cfg) for step in range(1000)) / 1000
        assert mean_depth(cfg) == pytest.approx(walked, abs=0.01)


# ---- memory, storage, time


def test_memory_of_a_70b_target_by_zero_stage_on_8_devices():
    run = settings("train", "target=llama3-70b", "data.num_prompts=10")
    trained = 1_403_027_456  # 3*8192*8192 + attention + MLP + norms + 8192*32000
    assert drafter_parameters(run.drafter, run.target.facts) == (trained, trained)
    rows = list(memory_rows(run, run.target.facts, 8))
    assert [row["zero_stage"] for row in rows] == [0, 1, 2, 3]
    assert [row["weights"] for row in rows] == [4 * trained] * 3 + [4 * trained // 8]
    assert [row["gradients"] for row in rows] == [4 * trained] * 2 + [4 * trained // 8] * 2
    assert [row["optimizer"] for row in rows] == [8 * trained] + [8 * trained // 8] * 3
    assert {row["target"] for row in rows} == {2 * 70_553_706_496}
    for row in rows:
        parts = ("weights", "gradients", "optimizer", "activations", "target")
        assert row["total"] == sum(row[part] for part in parts)


def test_bf16_training_keeps_fp32_masters_and_frozen_heads_cost_no_optimizer():
    run = settings("train", "trainer.dtype=bfloat16", "drafter.train_lm_head=false", "drafter.draft_vocab_size=32000",
                   "drafter.fc_norm=false")  # fmt: skip
    everything, trained = drafter_parameters(run.drafter, run.target.facts)
    assert everything - trained == 576 * 32000
    first = next(memory_rows(run, run.target.facts, 1))
    assert (first["weights"], first["gradients"], first["optimizer"]) == (2 * everything, 2 * trained, 12 * trained)


def test_activations_grow_with_row_length_depth_and_draft_vocabulary():
    plain = ("drafter.draft_vocab_size=32000", "drafter.ttt_steps=5", "trainer.row_length=1024")

    def size(*overrides: str) -> int:
        run = settings("train", *plain, *overrides)
        return planning.activation_bytes(run, run.target.facts)

    base = size()
    assert size("trainer.row_length=2048") == 2 * base
    assert size("drafter.draft_vocab_size=16000") == base - 5 * 1024 * 2 * 16000 * 4
    per_step = 12 * 576 + 3 * 1536 + 24 * 64
    assert size("drafter.ttt_steps=6") == base + 1024 * (4 * per_step + 8 * 32000)


def test_storage_tokens_and_steps():
    plan = make_plan(settings("train", "target=llama3-70b", "data.num_prompts=1000", "trainer.epochs=1.5"))
    assert plan["feature_bytes_per_token"] == 4 * 8192 * 2
    assert plan["response_tokens"] == 1000 * 256
    assert plan["tokens"] == 1000 * (256 + 128)
    assert plan["feature_bytes"] == 384_000 * 65_536
    assert plan["steps"] == 1.5 * 256_000 / 320
    assert make_plan(settings("train", "data.num_prompts=1000", "trainer.max_steps=7"))["steps"] == 7


def test_time_is_work_over_the_stated_speeds(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    plan = make_plan(settings("train", "target=llama3-8b", "data.num_prompts=1000", "trainer.epochs=1"))
    count, rows = 8_030_261_248, 384_000
    everything = plan["drafter_parameters"]
    assert plan["work"]["collect_flops"] == 2 * count * rows
    assert plan["work"]["target_forward_flops"] == 2 * count * rows
    assert plan["work"]["drafter_flops"] == round(6 * everything * 3.1 * rows)
    gpu, cpu = plan["hours"]
    assert gpu["machine"] == "4 x H100-class GPU" and cpu["machine"] == "4 x 2-core CPU"
    speed = planning.MACHINES[0]
    assert gpu["target_forward"] == pytest.approx(2 * count * rows / speed.flops / 4 / 3600)
    assert gpu["drafter"] == pytest.approx(plan["work"]["drafter_flops"] / speed.flops / 4 / 3600)
    # Reading 16 GB of weights for each of 32 batches x 256 tokens takes longer than the arithmetic.
    assert gpu["collect"] == pytest.approx(math.ceil(1000 / 32) * 256 * 2 * count / speed.bandwidth / 3600)
    assert gpu["total"] == pytest.approx(gpu["collect"] + gpu["target_forward"] + gpu["drafter"])


def test_nothing_is_collected_when_responses_are_given(tmp_path):
    plan = make_plan(settings("train", "data.num_prompts=10", f"data.responses={tmp_path}"))
    assert [row["collect"] for row in plan["hours"]] == [0.0, 0.0]
    assert "no collecting: data.responses is set" in plan["assumptions"]


def test_prompts_are_counted_where_they_can_be(tmp_path):
    lines = [json.dumps({"messages": [{"role": "user", "content": f"question {i}"}]}) for i in range(50)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    run = settings("train", "data=jsonl", f"data.path={tmp_path / 'p.jsonl'}", "data.eval_prompts=8")
    assert make_plan(run)["prompts"] == 42
    assumed = make_plan(settings("train", "data=hub", "data.dataset=a/b"))
    assert assumed["prompts"] == 50_000
    assert "50,000 prompts assumed; set data.num_prompts" in assumed["assumptions"][0]


# ---- facts


def write_config(folder, **changes) -> str:
    facts = asdict(facts_of("llama3-8b"))
    config = {theirs: facts[ours] for ours, theirs in CONFIG_NAMES.items()} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_facts_are_checked_against_a_local_copy(tmp_path):
    run = settings("train", "target=llama3-8b", f"target.path={write_config(tmp_path)}")
    facts, how = read_facts(run.target)
    assert facts.num_layers == 32
    assert how == f"checked against config.json in {tmp_path}"


@pytest.mark.parametrize("field", list(CONFIG_NAMES))
def test_a_fact_that_differs_is_an_error_naming_both_values(tmp_path, field):
    ours = asdict(facts_of("llama3-8b"))[field]
    theirs = True if field == "tie_word_embeddings" else 77
    path = write_config(tmp_path, **{CONFIG_NAMES[field]: theirs})
    run = settings("train", "target=llama3-8b", f"target.path={path}")
    with pytest.raises(TargetError) as caught:
        make_plan(run)
    assert f"target.facts.{field} is {ours}, but {CONFIG_NAMES[field]} is {theirs}" in str(caught.value)
    assert f"Set target.facts.{field}={theirs}" in str(caught.value)


def test_facts_are_checked_against_the_hub_when_it_answers(tmp_path, monkeypatch):
    asked = []

    def answer(repo, name, revision, etag_timeout):
        asked.append((repo, name, revision))
        return str(tmp_path / "config.json")

    write_config(tmp_path, num_hidden_layers=31)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *args, **kwargs: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", answer)
    target = settings("train", "target=llama3-8b").target
    with pytest.raises(TargetError, match="num_layers is 32, but num_hidden_layers is 31"):
        read_facts(target)
    assert asked == [(target.path, "config.json", target.revision)]
    write_config(tmp_path)
    assert read_facts(target)[1] == f"checked against config.json of {target.path} on the hub"


def test_without_the_hub_kept_facts_serve_and_it_is_said(monkeypatch):
    facts, how = read_facts(settings("train", "target=llama3-70b").target)
    assert facts.num_layers == 80
    assert how == "hub not reachable for meta-llama/Meta-Llama-3-70B-Instruct (OSError), using kept facts"


def test_pinned_and_random_targets_need_no_check():
    for name, layers in (("smollm2-135m", 30), ("tiny-random", 8)):
        target = settings("train", f"target={name}", "drafter.draft_vocab_size=256").target
        facts, how = read_facts(target)
        assert (facts.num_layers, how) == (layers, "from the settings: the target is pinned there")


def test_a_custom_target_is_read_from_its_folder(tmp_path):
    path = write_config(tmp_path)
    facts, how = read_facts(settings("train", "target=custom", f"target.path={path}").target)
    assert asdict(facts) == asdict(facts_of("llama3-8b"))
    assert how == f"read from config.json in {path}"


def test_config_without_the_newer_names_gets_transformers_defaults():
    config = {"hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 6, "num_attention_heads": 4}
    facts = facts_from({**config, "vocab_size": 10}, TargetConfig(name="x", path="x"))
    assert (facts.num_kv_heads, facts.head_dim, facts.tie_word_embeddings) == (4, 16, False)
    with pytest.raises(TargetError, match="has no vocab_size"):
        facts_from(config, TargetConfig(name="x", path="x"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("org/model", "its config.json cannot be had and no target.facts are kept"),
        ("EMPTY", "has no config.json"),
        ("a/b/c", "neither a folder here nor a hub id"),
    ],
)
def test_targets_without_facts_are_clear_errors(tmp_path, monkeypatch, path, message):
    from huggingface_hub.errors import HFValidationError

    def invalid(repo, *args, **kwargs):
        if repo.count("/") != 1:
            raise HFValidationError(repo)

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", invalid)
    target = settings("train", "target=custom", f"target.path={tmp_path if path == 'EMPTY' else path}").target
    with pytest.raises(TargetError, match=message):
        read_facts(target)


def test_nested_text_config_is_read(tmp_path):
    facts = asdict(facts_of("llama3-8b"))
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": {theirs: facts[ours] for ours, theirs in CONFIG_NAMES.items()}})
    )
    found, _ = read_facts(settings("train", "target=custom", f"target.path={tmp_path}").target)
    assert asdict(found) == facts


# ---- the printed plan


def test_the_plan_of_the_70b_target_is_printed_and_kept_in_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(target_facts, "HUB_TIMEOUT", 1)
    run = settings("train", "target=llama3-70b", "data.num_prompts=1000", f"output_dir={tmp_path}", "deepspeed=zero2")
    console = Console(record=True, width=200, file=io.StringIO())
    start = time.monotonic()
    plan = run_plan(run, console)
    assert time.monotonic() - start < 5
    assert json.loads((tmp_path / "plan.json").read_text()) == plan
    text = console.export_text()
    for line in plan["assumptions"]:
        assert line in text
    for words in (
        "llama3-70b: 70,553,706,496 parameters (hub not reachable",
        "2 (chosen)",
        f"{2 * 70_553_706_496 / GIB:,.2f}",
        f"{384_000 * 65_536 / GIB:,.2f} GiB of hidden states",
        "65,536 bytes per token",
        "1 x H100-class GPU",
    ):
        assert words in text, words
