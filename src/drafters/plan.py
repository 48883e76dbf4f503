"""plan=true: memory, storage and time of a training run from the target's shape alone; no weight is loaded.

Counts of parameters are exact for Llama-like targets. Activations and times are estimates; every assumption behind
them is part of the plan.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from drafters.artifacts import atomic_write_json
from drafters.config import TargetConfig, TargetFacts, TrainRun
from drafters.config_drafter import DrafterConfig
from drafters.corpus import load_prompts
from drafters.facts import read_facts
from drafters.plan_families import FORMULAS

GIB = 2**30
WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
ASSUMED_PROMPTS = 50_000  # for a hub set whose size is not known before it is fetched
ASSUMED_PROMPT_TOKENS = 128


@dataclass(frozen=True)
class Machine:
    """What one device is assumed to reach in practice, not its peak."""

    name: str
    flops: float  # per second
    bandwidth: float  # bytes per second, reading weights


# Half of an H100's dense bf16 peak and of its memory bandwidth; two CPU cores as measured with bf16 matmuls.
MACHINES = (Machine("H100-class GPU", 4.0e14, 1.7e12), Machine("2-core CPU", 1.0e11, 1.4e10))


# ---- counts


def target_parameters(facts: TargetFacts) -> int:
    """Parameters of a Llama-like target: embedding, head unless tied, attention, gated MLP, norms."""
    attention = facts.hidden_size * facts.head_dim * (2 * facts.num_heads + 2 * facts.num_kv_heads)
    layer = attention + 3 * facts.hidden_size * facts.intermediate_size + 2 * facts.hidden_size
    tables = facts.vocab_size * facts.hidden_size * (1 if facts.tie_word_embeddings else 2)
    return tables + facts.num_layers * layer + facts.hidden_size


def drafter_parameters(cfg: DrafterConfig, facts: TargetFacts) -> tuple[int, int]:
    """(all, trained) parameters of the drafter; the target's embedding, which it borrows, is not among them."""
    return FORMULAS[cfg.family].parameters(cfg, facts)


def memory_rows(run: TrainRun, facts: TargetFacts, world: int) -> Iterator[dict[str, Any]]:
    """Bytes per device for ZeRO stages 0 to 3, one row of row_length tokens at a time."""
    everything, trained = drafter_parameters(run.drafter, facts)
    width = WIDTH[run.trainer.dtype]
    # bf16 training keeps fp32 master weights beside Adam's two fp32 moments.
    optimizer = trained * (8 if run.trainer.dtype == "float32" else 12)
    target = target_parameters(facts) * WIDTH[target_dtype(run.target)]
    for stage in range(4):
        row = {
            "zero_stage": stage,
            "weights": everything * width // (world if stage >= 3 else 1),
            "gradients": trained * width // (world if stage >= 2 else 1),
            "optimizer": optimizer // (world if stage >= 1 else 1),
            "activations": activation_bytes(run, facts),
            "target": target,
        }
        yield row | {"total": sum(value for key, value in row.items() if key != "zero_stage")}


def activation_bytes(run: TrainRun, facts: TargetFacts) -> int:
    """Estimate for one row: the drafter's saved tensors at full depth, fp32 logits, the target's taps and one layer."""
    cfg, length = run.drafter, run.trainer.row_length
    formula, width = FORMULAS[cfg.family], WIDTH[run.trainer.dtype]
    drafter = formula.depth(cfg) * length * (formula.saved(cfg, facts) * width + 2 * cfg.draft_vocab_size * 4)
    layer = 8 * facts.hidden_size + 3 * facts.intermediate_size
    return drafter + length * (formula.states * facts.hidden_size + layer) * WIDTH[target_dtype(run.target)]


def target_dtype(target: TargetConfig) -> str:
    """The dtype planned for: `auto` is bfloat16, as nearly every checkpoint is stored."""
    return "bfloat16" if target.dtype == "auto" else target.dtype


def count_prompts(run: TrainRun) -> tuple[int, str]:
    """(prompts trained on, how that is known); only sources that need neither a target nor the network are read."""
    data = run.data
    if data.num_prompts is None and data.source in ("builtin", "jsonl"):
        count = len(load_prompts(data))
        return count, f"{count} prompts of data.source={data.source} are not held out"
    if data.num_prompts is not None:
        return data.num_prompts, f"data.num_prompts={data.num_prompts}"
    return ASSUMED_PROMPTS, f"{ASSUMED_PROMPTS:,} prompts assumed; set data.num_prompts to plan for another number"


# ---- the plan


def make_plan(run: TrainRun) -> dict[str, Any]:
    """The whole plan as plain data; raises TargetError when the kept facts and the target's config.json differ."""
    facts, checked = read_facts(run.target)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    prompts, prompts_why = count_prompts(run)
    prompt_tokens = min(ASSUMED_PROMPT_TOKENS, run.data.max_prompt_tokens)
    response = prompts * run.data.max_new_tokens
    tokens = response + prompts * prompt_tokens
    per_epoch = max(1, math.ceil(response / run.trainer.tokens_per_step))
    steps = run.trainer.max_steps or math.ceil(run.trainer.epochs * per_epoch)
    row_tokens = round(steps * tokens / per_epoch)  # prompts ride along in the rows
    everything, trained = drafter_parameters(run.drafter, facts)
    formula = FORMULAS[run.drafter.family]
    per_token = formula.states * facts.hidden_size * 2  # the taps and the last hidden state, bf16
    target_count, passes = target_parameters(facts), formula.passes(run.drafter, facts)
    work = {
        "target_forward_flops": round(2 * target_count * row_tokens * formula.target_passes(run.drafter)),
        "drafter_flops": round(6 * everything * passes * row_tokens),
        "collect_flops": 2 * target_count * tokens,
    }
    dtype = target_dtype(run.target)
    batches = math.ceil(prompts / run.data.batch_size) * run.data.max_new_tokens
    collected = run.data.responses is not None
    return {
        "target": run.target.name,
        "drafter": run.drafter.family,
        "facts": asdict(facts),
        "facts_checked": checked,
        "world_size": world,
        "zero_stage": run.deepspeed.zero_stage,
        "target_parameters": target_count,
        "drafter_parameters": everything,
        "trained_parameters": trained,
        "memory_per_device_bytes": list(memory_rows(run, facts, world)),
        "target_bytes_if_sharded": target_count * WIDTH[dtype] // world,
        "feature_bytes_per_token": per_token,
        "feature_bytes": per_token * tokens,
        "prompts": prompts,
        "response_tokens": response,
        "tokens": tokens,
        "steps": steps,
        "work": work,
        "hours": [
            _hours(machine, world, work, batches * target_count * WIDTH[dtype], collected) for machine in MACHINES
        ],
        "assumptions": _assumptions(run, prompts_why, prompt_tokens, dtype, world, passes),
    }


def _hours(machine: Machine, world: int, work: dict[str, int], read: int, collected: bool) -> dict[str, Any]:
    collect = 0.0 if collected else max(work["collect_flops"] / machine.flops, read / machine.bandwidth) / 3600
    features = work["target_forward_flops"] / machine.flops / world / 3600
    drafter = work["drafter_flops"] / machine.flops / world / 3600
    total = collect + features + drafter
    return {
        "machine": f"{world} x {machine.name}",
        "collect": collect,
        "target_forward": features,
        "drafter": drafter,
        "total": total,
    }


def _assumptions(
    run: TrainRun, prompts_why: str, prompt_tokens: int, dtype: str, world: int, passes: float
) -> list[str]:
    trainer, drafter, data = run.trainer, run.drafter, run.data
    formula = FORMULAS[drafter.family]
    adam = (
        "8 bytes per trained weight" if trainer.dtype == "float32" else "12 bytes per trained weight (fp32 master copy)"
    )
    speeds = "; ".join(f"{m.name} {m.flops:.1e} FLOP/s, {m.bandwidth:.1e} B/s" for m in MACHINES)
    how = "no collecting: data.responses is set" if data.responses else (
        f"collecting on one device, batches of {data.batch_size}: the slower of 2 FLOPs per parameter and token, and "
        f"reading the weights once per batch and new token"
    )  # fmt: skip
    return [
        f"prompts: {prompts_why}; {prompt_tokens} tokens per prompt",
        f"responses: {data.max_new_tokens} tokens each (data.max_new_tokens, the longest they can be)",
        f"target: {dtype}, whole on every device; sharding it is not done by train.py",
        f"drafter: {trainer.dtype} weights and gradients; AdamW {adam}",
        f"activations: one row of {trainer.row_length} tokens per device, draft steps: {formula.depth(drafter)}, "
        f"every token supervised",
        f"training: {2 * formula.target_passes(drafter):g} FLOPs per target parameter and row token, 6 per drafter "
        f"parameter, row token and draft step that meets it ({passes:.2f} on average)",
        how,
        f"devices: {world} (WORLD_SIZE); speeds reached: {speeds}",
        "not counted: evaluation, loading, the framework's own memory (1 to 2 GiB on a GPU)",
    ]


def render(plan: dict[str, Any]) -> Group:
    """The plan as tables for the terminal."""
    memory = Table(title="memory per device, GiB")
    memory.add_column("ZeRO stage")
    names = ("weights", "gradients", "optimizer", "activations", "target", "total")
    for name in names:
        memory.add_column(name, justify="right")
    for row in plan["memory_per_device_bytes"]:
        chosen = " (chosen)" if row["zero_stage"] == plan["zero_stage"] else ""
        memory.add_row(f"{row['zero_stage']}{chosen}", *(f"{row[name] / GIB:,.2f}" for name in names))
    time = Table(title="hours")
    time.add_column("on")
    for name in ("collect", "target_forward", "drafter", "total"):
        time.add_column(name.replace("_", " "), justify="right")
    for row in plan["hours"]:
        time.add_row(row["machine"], *(f"{row[n]:,.2f}" for n in ("collect", "target_forward", "drafter", "total")))
    kept = (
        f"{plan['feature_bytes'] / GIB:,.2f} GiB of hidden states if kept (trainer.features=cached): "
        f"{plan['feature_bytes_per_token']:,} bytes per token; none with trainer.features=online"
    )
    lines = [
        f"target   {plan['target']}: {plan['target_parameters']:,} parameters ({plan['facts_checked']})",
        f"         sharded over {plan['world_size']} devices it would take "
        f"{plan['target_bytes_if_sharded'] / GIB:,.2f} GiB each",
        f"drafter  {plan['drafter']}: {plan['drafter_parameters']:,} parameters, "
        f"{plan['trained_parameters']:,} trained",
        f"data     {plan['prompts']:,} prompts, {plan['tokens']:,} tokens ({plan['response_tokens']:,} of responses)",
        f"steps    {plan['steps']:,}",
        f"storage  {kept if plan['feature_bytes_per_token'] else 'no hidden states: the target is trained too'}",
    ]
    notes = Text("assumptions\n" + "\n".join(f"  - {line}" for line in plan["assumptions"]))
    return Group(Text("\n".join(lines)), memory, time, notes)


def run_plan(run: TrainRun, console: Console) -> dict[str, Any]:
    """Make the plan, print it and leave it as output_dir/plan.json."""
    plan = make_plan(run)
    Path(run.output_dir).mkdir(parents=True, exist_ok=True)
    atomic_write_json(Path(run.output_dir) / "plan.json", plan)
    console.print(render(plan), soft_wrap=True)
    return plan
