"""A small training run on the tiny random target, shared by the training tests."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from drafters.config import BuiltinData, DeepSpeedConfig, Eagle3Config, LoggerConfig, TrainerConfig, TrainRun
from drafters.config_drafter import DrafterConfig
from drafters.corpus import ResponseRecord
from drafters.logger import Logger
from drafters.models import FAMILIES, Drafter
from drafters.target import Target
from drafters.trainer import TrainResult, train
from drafters.vocab import build, count_tokens

DRAFT_VOCAB = 300


def make_records(count: int, prompt: int = 6, response: int = 20, seed: int = 0) -> list[ResponseRecord]:
    """Records of random ids whose lengths vary around the given ones: no greedy answers, so drawn at temperature 1."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        return torch.randint(3, 500, (length,), generator=generator).tolist()

    return [
        ResponseRecord(f"record-{i}", "chat", draw(prompt + i % 3), draw(response + i % 5), "length", 1.0, 0)
        for i in range(count)
    ]


def run_settings(target: Target, *, resume: str = "auto", zero_stage: int = 0,
                 drafter: dict[str, Any] | DrafterConfig | None = None, **trainer: Any) -> TrainRun:  # fmt: skip
    """Settings of a run of 4 steps of 2 rows, cadences out of the way unless given; drafter: of EAGLE-3, or another's.
    """
    options = {
        "max_steps": 4, "tokens_per_step": 80, "row_length": 64, "learning_rate": 1e-2, "warmup_ratio": 0.0,
        "eval_every": 1000, "save_every": 1000, "log_every": 1, "num_threads": 1,
    } | trainer  # fmt: skip
    if not isinstance(drafter, DrafterConfig):
        eagle3 = {"draft_vocab_size": DRAFT_VOCAB, "ttt_steps": 2, "curriculum": [], "fc_norm": True}
        drafter = Eagle3Config(**eagle3 | (drafter or {}))
    return TrainRun(
        target=target.config,
        drafter=drafter,
        data=BuiltinData(),
        trainer=TrainerConfig(**options),
        deepspeed=DeepSpeedConfig(zero_stage=zero_stage),
        logger=LoggerConfig(wandb=False),
        output_dir="unused",
        resume=resume,
    )


def new_drafter(target: Target, records: list[ResponseRecord], cfg: TrainRun) -> Drafter:
    """A drafter of the target's shape with fixed random weights."""
    torch.manual_seed(7)
    family = FAMILIES[cfg.drafter.family]
    drafter = family(family.shape_for(cfg.drafter, target))
    vocab = build(count_tokens(records, target.vocab_size), cfg.drafter.draft_vocab_size, target.eos_ids)
    drafter.bind_vocab(vocab.d2t, vocab.t2d)
    drafter.bind(target)
    return drafter


def run_training(target: Target, records: list[ResponseRecord], cfg: TrainRun, out_dir: Path, evaluate: Any = None
                 ) -> tuple[Drafter, TrainResult]:  # fmt: skip
    """Train from the fixed start; returns the drafter and the result."""
    drafter = new_drafter(target, records, cfg)
    console = Console(file=io.StringIO())
    logger = Logger(out_dir, cfg.logger)
    return drafter, train(drafter, target, records, dataclasses.replace(cfg), out_dir, evaluate, logger, console)
