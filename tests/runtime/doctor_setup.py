"""A target that a small drafter can learn in a second, and training runs on its answers, sound or spoilt."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors.torch import load_file, save_file

from drafters.artifacts import write_folder
from drafters.chat import render_prompt
from drafters.cli import save
from drafters.config import (
    BuiltinData,
    DeepSpeedConfig,
    Eagle3Config,
    EvalConfig,
    LoggerConfig,
    RuntimeConfig,
    TargetConfig,
    TrainerConfig,
    TrainRun,
)
from drafters.corpus import ResponseRecord, record_line
from drafters.logger import Logger
from drafters.responses import KIND, RECORDS_NAME
from drafters.target import Target
from drafters.trainer import train
from runtime.beginning import make_drafter
from runtime.engine import Engine
from runtime.evaluate import borrowed
from runtime.sampling import SamplingParams

WORDS = "red green blue fox dog cat sun moon tree house river stone bird fish cloud rain snow wind fire ice".split()
QUESTIONS = [f"tell me of {one} and {other}" for one in WORDS for other in WORDS]
LENGTH = 24  # tokens of an answer


def calm_target(folder: Path, dest: Path) -> TargetConfig:
    """The random target with nearly all of what its layers add taken away: the last token decides the next but for
    a little, so that texts of one prompt teach something about those of another."""
    shutil.copytree(folder, dest)
    weights = load_file(dest / "model.safetensors")
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name] = weights[name] * 0.01
    save_file(weights, dest / "model.safetensors", metadata={"format": "pt"})
    return TargetConfig(name="calm", dtype="float32", device="cpu", path=str(dest))


def answers(target: Target, questions: Sequence[str], ids: Callable[[str], list[int]] | None = None
            ) -> list[ResponseRecord]:  # fmt: skip
    """The target's own greedy answers; ids: how a question becomes a prompt, by default by the target's template."""
    rows = [_rendered(target, question) if ids is None else ids(question) for question in questions]
    with borrowed(target):
        found = Engine.load(target, "none", batch_size=16).generate(rows, SamplingParams(LENGTH))
    return [
        ResponseRecord(question, "ab"[index % 2], row, list(each.token_ids), each.finish_reason, 0.0, 0)
        for index, (question, row, each) in enumerate(zip(questions, rows, found))
    ]


def _rendered(target: Target, question: str) -> list[int]:
    return render_prompt(target.tokenizer, [{"role": "user", "content": question}])


def write_answers(records: Sequence[ResponseRecord], target: Target, dest: Path) -> Path:
    """A folder as distill.py leaves it."""
    meta = {
        "settings": {**target.fingerprint, "data.source": "builtin", "data.temperature": 0.0},
        "counts": {"records": len(records)},
        "command": "python distill.py",
    }
    text = "".join(map(record_line, records))
    return write_folder(dest, lambda folder: _write(folder / RECORDS_NAME, text), KIND, meta)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def settings(config: TargetConfig, folder: Path, steps: int = 60, **drafter: Any) -> TrainRun:
    """Settings of a run in `folder`, on the answers in folder/answers, measured on four other questions."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"id": q, "category": "ab"[i % 2], "prompt": q} for i, q in enumerate(QUESTIONS[5::100])]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    eagle3 = {"draft_vocab_size": 512, "ttt_steps": 2, "curriculum": [], "fc_norm": True} | drafter
    return TrainRun(
        target=config,
        drafter=Eagle3Config(**eagle3),
        data=BuiltinData(responses=str(folder / "answers")),
        trainer=TrainerConfig(
            max_steps=steps, tokens_per_step=300, row_length=512, features="cached", learning_rate=1e-2,
            eval_every=1000, save_every=1000, log_every=2, num_threads=1,
        ),
        deepspeed=DeepSpeedConfig(),
        runtime=RuntimeConfig(num_draft_tokens=4, depth=2, top_k=2, batch_size=8),
        eval=EvalConfig(prompts=str(folder / "questions.jsonl"), max_new_tokens=LENGTH),
        logger=LoggerConfig(wandb=False),
        output_dir=str(folder),
    )  # fmt: skip


def train_run(run: TrainRun, target: Target, records: Sequence[ResponseRecord]) -> TrainRun:
    """Train as train.py does, up to the last checkpoint; returns the settings of a doctor of this run."""
    folder = Path(run.output_dir)
    write_answers(records, target, folder / "answers")
    save(run)
    drafter = make_drafter(run, target, records)
    logger = Logger(folder, run.logger)
    train(drafter, target, records, run, folder, None, logger, Console(file=io.StringIO()))
    return dataclasses.replace(run, doctor=str(folder), data=BuiltinData())
