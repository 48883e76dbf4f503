"""What sampling costs in acceptance: coupled drafting beside drafts that know no noise and beside rejection."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from drafters.config import BuiltinData
from drafters.corpus import load_prompts
from runtime import Engine, SamplingParams
from runtime.metrics import Stats
from tests.test_real_target import KEPT, target  # noqa: F401 (a fixture)

pytestmark = pytest.mark.slow
COUNT, TOKENS, SEEDS, NODES = 18, 64, 3, 8


@pytest.fixture(scope="module")
def prompts(target):  # noqa: F811
    return [list(prompt.messages) for prompt in load_prompts(BuiltinData(eval_prompts=sys.maxsize), "eval")[:COUNT]]


def tau(target, prompts, temperature: float, rule: str, blind: bool = False) -> float:  # noqa: F811
    """Tokens per target forward over all prompts and seeds; blind: the drafter is not told the noise."""
    engine = Engine.load(target, str(KEPT), batch_size=6, num_draft_tokens=NODES)
    if blind:
        propose = engine.proposer.propose
        engine.proposer.propose = lambda budgets: propose(
            {row: dataclasses.replace(budget, noise=None) for row, budget in budgets.items()}
        )
    total = Stats()
    for seed in range(SEEDS if temperature else 1):
        params = [
            SamplingParams(TOKENS, temperature=temperature, seed=100 * seed + i, verification=rule)
            for i in range(COUNT)
        ]
        for result in engine.generate(prompts, params):
            total.add(result.stats)
    return total.acceptance_length


def test_coupled_drafting_keeps_acceptance_at_a_temperature(target, prompts, record_property):  # noqa: F811
    greedy = tau(target, prompts, 0.0, "coupled")
    table = {"T=0": greedy}
    for temperature in (0.7, 1.0):
        table[f"T={temperature} coupled"] = tau(target, prompts, temperature, "coupled")
        table[f"T={temperature} top-k"] = tau(target, prompts, temperature, "coupled", blind=True)
        table[f"T={temperature} rejection"] = tau(target, prompts, temperature, "rejection")
    for name, value in table.items():
        record_property(name, round(value, 3))
    found = {name: round(value, 3) for name, value in table.items()}
    assert table["T=1.0 coupled"] / greedy >= 0.93, found
    assert table["T=1.0 coupled"] - table["T=1.0 top-k"] >= 0.08, found
    assert table["T=1.0 coupled"] - table["T=1.0 rejection"] >= -0.03, found
