"""A small training run on the tiny random target, shared by the training tests."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from drafters.config import BuiltinData, DeepSpeedConfig, Eagle3Config, LoggerConfig, TrainerConfig, TrainRun
from drafters.corpus import ResponseRecord
from drafters.logger import Logger
from drafters.models import Eagle3Drafter, Eagle3Shape
from drafters.target import Target
from drafters.trainer import TrainResult, train
from drafters.vocab import build, count_tokens

DRAFT_VOCAB = 300


def make_records(count: int, prompt: int = 6, response: int = 20, seed: int = 0) -> list[ResponseRecord]:
    """Records of random ids whose lengths vary around the given ones."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        return torch.randint(3, 500, (length,), generator=generator).tolist()

    return [
        ResponseRecord(f"record-{i}", "chat", draw(prompt + i % 3), draw(response + i % 5), "length", 0.0, 0)
        for i in range(count)
    ]


def run_settings(target: Target, *, resume: str = "auto", zero_stage: int = 0, drafter: dict[str, Any] | None = None,
                 **trainer: Any) -> TrainRun:  # fmt: skip
    """Settings of a run of 4 steps of 2 rows, cadences out of the way unless given."""
    options = {
        "max_steps": 4, "tokens_per_step": 80, "row_length": 64, "learning_rate": 1e-2, "warmup_ratio": 0.0,
        "eval_every": 1000, "save_every": 1000, "log_every": 1, "num_threads": 1,
    } | trainer  # fmt: skip
    eagle3 = {"draft_vocab_size": DRAFT_VOCAB, "ttt_steps": 2, "curriculum": [], "fc_norm": True} | (drafter or {})
    return TrainRun(
        target=target.config,
        drafter=Eagle3Config(**eagle3),
        data=BuiltinData(),
        trainer=TrainerConfig(**options),
        deepspeed=DeepSpeedConfig(zero_stage=zero_stage),
        logger=LoggerConfig(wandb=False),
        output_dir="unused",
        resume=resume,
    )


def new_drafter(target: Target, records: list[ResponseRecord], cfg: TrainRun) -> Eagle3Drafter:
    """A drafter of the target's shape with fixed random weights."""
    torch.manual_seed(7)
    shape = Eagle3Shape(
        hidden_size=64, target_hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16,
        rms_norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=2048, vocab_size=target.vocab_size,
        draft_vocab_size=cfg.drafter.draft_vocab_size, fc_norm=cfg.drafter.fc_norm,
    )  # fmt: skip
    drafter = Eagle3Drafter(shape)
    vocab = build(count_tokens(records, target.vocab_size), shape.draft_vocab_size, target.eos_ids)
    drafter.bind_vocab(vocab.d2t, vocab.t2d)
    drafter.bind_embedding(target.embed_weight)
    return drafter


def run_training(target: Target, records: list[ResponseRecord], cfg: TrainRun, out_dir: Path, evaluate: Any = None
                 ) -> tuple[Eagle3Drafter, TrainResult]:  # fmt: skip
    """Train from the fixed start; returns the drafter and the result."""
    drafter = new_drafter(target, records, cfg)
    console = Console(file=io.StringIO())
    logger = Logger(out_dir, cfg.logger)
    return drafter, train(drafter, target, records, dataclasses.replace(cfg), out_dir, evaluate, logger, console)
