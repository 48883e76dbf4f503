"""The stable surface: others script against these names, so a change here is a change to announce."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from drafters.config import RUNS, SamplingConfig
from drafters.config_allowed import leaves
from tests.helpers import CONF, settings

TARGET = """
    target: name path revision dtype device license kept_responses
    target.wheel: package version filename sha256 gguf gguf_sha256
    target.random: seed hidden_size intermediate_size num_layers num_heads num_kv_heads vocab_size
    target.facts: hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim vocab_size
    target.facts: tie_word_embeddings
"""
SETTINGS = {
    "train": """
        drafter: family draft_vocab_size ttt_steps ttt_decay curriculum fc_norm norm_output hidden_size
        drafter: intermediate_size num_heads num_kv_heads head_dim taps warm_start train_lm_head
        drafter: native num_layers layers
        drafter: head_decay own_heads prefix
        drafter: lora_rank lora_alpha lora_dropout lora_targets kl_weight heads_weight heads_schedule heads_warmup
        drafter: heads_lr_multiplier
        drafter: objective jsd_beta lk_decay feature_weight logit_weight feature_noise
        data: source responses num_prompts max_prompt_tokens max_new_tokens temperature seed batch_size
        data: eval_prompts user_temperature path dataset split config revision columns
        trainer: epochs max_steps max_records tokens_per_step row_length features feature_store learning_rate betas
        trainer: weight_decay warmup_ratio min_lr_ratio clip_grad dtype eval_every save_every log_every seed num_threads
        deepspeed: zero_stage
        runtime: num_draft_tokens depth top_k tree batch_size max_length debug
        eval: prompts num_prompts max_new_tokens compare_transformers check_identity
        logger: wandb project run_name
        export: source dialect push
        .: output_dir resume init_from plan doctor
    """,
    "distill": """
        data: source responses num_prompts max_prompt_tokens max_new_tokens temperature seed batch_size
        data: eval_prompts user_temperature path dataset split config revision columns
        .: output_dir features inspect
    """,
    "serve": """
        drafter: path
        runtime: num_draft_tokens depth top_k tree batch_size max_length debug
        eval: prompts num_prompts max_new_tokens compare_transformers check_identity
        sampling: temperature seed top_k top_p min_p repetition_penalty presence_penalty frequency_penalty
        sampling: min_tokens
        .: verification mode drafters prompt output_dir
    """,
}

REPORT_KEYS = """
    acceptance_length acceptance_at rounds drafted accepted emitted tokens_per_s plain_tokens_per_s
    transformers_tokens_per_s speedup speedup_vs_transformers identical prompts near_ties target drafter dtype
    temperature command versions per_prompt time_share latency_ms by_proposer chosen_n predicted verification lossy
""".split()


@pytest.mark.parametrize("script", list(RUNS))
def test_settings_keep_their_names(script):
    frozen = set()
    for line in f"{TARGET}{SETTINGS[script]}".split("\n"):
        if not line.strip():
            continue
        section, _, names = line.strip().partition(": ")
        frozen |= {name if section == "." else f"{section}.{name}" for name in names.split()}
    assert {path for path, _, _ in leaves(RUNS[script])} == frozen


@pytest.mark.parametrize(
    ("script", "overrides"),
    [
        ("train", "target=tiny-random drafter=eagle3 data=builtin output_dir=D resume=auto plan=true"),
        ("train", "resume=never init_from=conf data.responses=conf"),
        ("distill", "target=tiny-random data=magpie output_dir=D inspect=3"),
        ("serve", "target=tiny-random drafter.path=conf mode=eval eval.prompts=pyproject.toml eval.num_prompts=2"),
        ("serve", "drafter.path=none eval.max_new_tokens=3 sampling.temperature=0.5 sampling.seed=7 output_dir=D"),
        ("serve", "drafter.path=ngram mode=chat"),
        ("serve", "mode=compare drafters=[conf,ngram,conf+suffix,none] eval.num_prompts=2 sampling.top_p=0.9"),
        ("train", "target=tiny-random drafter=eagle3 doctor=conf data.responses=conf output_dir=D"),
        ("train", "export.from=conf export.dialect=[eagle3,speculators] export.push=org/name output_dir=D"),
        ("serve", "mode=generate prompt=hello"),
        ("serve", "mode=import drafter.path=conf target=tiny-random output_dir=D"),
        ("serve", "drafter.path=org/drafter"),
    ],
)
def test_documented_commands_are_accepted(script, overrides, monkeypatch):
    monkeypatch.chdir(CONF.parent)
    small = ["drafter.draft_vocab_size=256"] if "drafter=eagle3" in overrides else []
    run = settings(script, *overrides.split(), *small)
    for override in overrides.split():
        path, _, value = override.partition("=")
        found = run
        for name in path.replace("export.from", "export.source").split("."):
            found = getattr(found, name)
        if isinstance(found, str | int | float):
            assert str(found).lower() == value.lower(), override


def test_report_keeps_its_keys():
    from runtime.report import KEYS

    assert [key for key in REPORT_KEYS if key not in KEYS] == []
    assert set(KEYS) - set(REPORT_KEYS) == {"machine"}


def test_the_library_keeps_its_names():
    import runtime
    from runtime import Engine, Result, SamplingParams

    assert {"Engine", "SamplingParams", "Result"} <= set(runtime.__all__)
    load = inspect.signature(Engine.load).parameters
    assert list(load)[:2] == ["target", "drafter"]
    assert load["drafter"].default is None
    assert any(parameter.kind is parameter.VAR_KEYWORD for parameter in load.values())
    assert list(inspect.signature(Engine.generate).parameters) == ["self", "prompts", "params"]
    assert {"token_ids", "text", "finish_reason", "stats"} <= {field.name for field in dataclasses.fields(Result)}
    sampling = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert sampling == {
        "max_new_tokens": 128, "temperature": 0.0, "seed": 0, "stop": (), "ignore_eos": False, "top_k": 0, "top_p": 1.0,
        "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": (),
        "min_tokens": 0, "bad_words": (), "verification": "coupled",
    }  # fmt: skip
    # sampling.* of serve.py are fields of the same name and default.
    served = {field.name: field.default for field in dataclasses.fields(SamplingConfig)}
    assert served.items() <= sampling.items()
