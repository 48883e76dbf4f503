"""One rank of a two-rank run, started by test_trainer."""

from __future__ import annotations

import os
from pathlib import Path

from drafters.config import TargetConfig
from drafters.target import Target
from tests.drafters.training_setup import make_records, run_settings, run_training


def main() -> None:
    """Train one step at each ZeRO stage; where and how is in the environment."""
    where = os.environ["RANKS_TARGET"]
    target = Target.load(TargetConfig(name="tiny-random", dtype="float32", device="cpu", path=where))
    for stage in os.environ["RANKS_STAGES"].split():
        cfg = run_settings(target, max_steps=1, tokens_per_step=160, zero_stage=int(stage))
        run_training(target, make_records(12), cfg, Path(os.environ["RANKS_OUT"]) / stage)
