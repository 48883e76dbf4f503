"""Measures a drafter: acceptance, speed against plain decoding and transformers, equality with plain decoding."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from drafters.config import BuiltinData, EvalConfig, RuntimeConfig, SamplingConfig, ServeRun
from drafters.corpus import Prompt, load_prompts, read_prompt_file
from drafters.models import Drafter
from drafters.target import Target
from runtime import report as reports
from runtime.contest import Contest, Drafting, acceptance_at, encode
from runtime.discover import choose_drafter
from runtime.engine import Engine
from runtime.metrics import Stats
from runtime.sampling import SamplingParams

log = logging.getLogger(__name__)

OURS = "ours"
QUICK_NODES = 16


def evaluate(cfg: ServeRun, console: Console) -> dict[str, Any]:
    """serve.py mode=eval: measures, leaves report.json and report.png in output_dir, prints the table.

    Returns the report; raises LosslessError, after writing, when fp32 text differs from plain decoding's.
    """
    target = Target.load(cfg.target)
    drafter = choose_drafter(cfg.drafter.path, target)
    report = measure(
        target, drafter, eval_prompts(cfg.eval), cfg.runtime, cfg.eval, cfg.sampling, console, cfg.verification
    )
    reports.write(report, Path(cfg.output_dir), console)
    reports.check_lossless(report)
    return report


def eval_prompts(cfg: EvalConfig) -> list[Prompt]:
    """Prompts of the file eval.prompts, or the built-in eval split; the first eval.num_prompts of them."""
    if cfg.prompts is None:
        prompts = load_prompts(BuiltinData(eval_prompts=sys.maxsize), "eval")
    else:
        prompts = read_prompt_file(Path(cfg.prompts).expanduser())
    if cfg.num_prompts is not None and cfg.num_prompts > len(prompts):
        log.warning("eval.num_prompts is %d, there are only %d prompts: taking all", cfg.num_prompts, len(prompts))
    return prompts[: cfg.num_prompts]


def measure(
    target: Target,
    drafter: Drafting,
    prompts: Sequence[Prompt],
    runtime: RuntimeConfig,
    settings: EvalConfig,
    sampling: SamplingConfig,
    console: Console | None = None,
    verification: str = "coupled",
) -> dict[str, Any]:
    """The report (report.KEYS) of a drafter on prompts; every rate is a sum over a sum.

    Each prompt is answered by the drafting engine, by the same engine without drafts, and by transformers, one right
    after the other. A drafter that brings an adapter is measured, and compared, on the target it tunes. Lays the
    target's weights out for decoding. Raises ConfigError when a prompt is too long.
    """
    contest = Contest(target, {OURS: drafter}, prompts, runtime, settings, sampling, verification)
    contest.run(console)
    return contest.report(OURS)


def quick_acceptance(
    drafter: Drafter | tuple[Drafter, tuple[int, ...]],
    target: Target,
    prompts: Sequence[Prompt],
    runtime: RuntimeConfig,
    max_new_tokens: int,
) -> dict[str, Any]:
    """Acceptance of a drafter still in training, by the runtime's own verify at T=0, without timing.

    Under num_draft_tokens=auto trees have QUICK_NODES nodes: sizes chosen by time would make acceptance a matter of
    the machine's load. They are dynamic, as what shapes static ones is measured once training is done. All prompts
    run at once: it changes no token, and one check of many rows is cheaper than many checks. The drafter is copied;
    the shared target gets its own modules back, so what training computes next does not depend on whether this ran.
    """
    with borrowed(target):
        shape = {"tree": "dynamic", "batch_size": len(prompts)}
        if runtime.num_draft_tokens == "auto":
            shape["num_draft_tokens"] = QUICK_NODES
        engine = Engine.load(target, drafter, **asdict(runtime) | shape)
        ids = encode(engine, prompts, max_new_tokens)
        total = Stats()
        for result in engine.generate(ids, SamplingParams(max_new_tokens)):
            total.add(result.stats)
    return {
        "acceptance_length": total.acceptance_length,
        "acceptance_at": acceptance_at(total, runtime.depth),
        "rounds": total.rounds,
        "emitted": total.emitted,
    }


@contextmanager
def borrowed(target: Target) -> Iterator[None]:
    """Gives the target its own layers and attention back at the end."""
    model = target.model
    modules = dict(model.named_modules())
    attention = model.config._attn_implementation
    try:
        yield
    finally:
        for name, module in modules.items():
            if name and model.get_submodule(name) is not module:
                model.set_submodule(name, module)
        model.set_attn_implementation(attention)
