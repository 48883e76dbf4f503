"""serve.py mode=compare: several drafters on the same prompts, interleaved prompt by prompt, in one table."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from drafters.artifacts import atomic_write_json, atomic_write_text
from drafters.config import ServeRun
from drafters.drafter_path import DrafterPart, parse_drafter_path
from drafters.target import Target
from drafters.training_facts import TrainingFacts, read_training
from runtime import report as reports
from runtime.contest import PEER, PLAIN, Contest, shown
from runtime.evaluate import eval_prompts
from runtime.footprint import memory_bytes
from runtime.identity import LosslessError
from runtime.loading import adapter_of
from runtime.metrics import Stats
from runtime.picture_compare import picture

log = logging.getLogger(__name__)

# What an entry of compare.json has beside report.KEYS.
EXTRA_KEYS = (
    "name", "params", "extra_bytes", "train_tokens", "train_minutes", "acceptance_length_t1", "draft_share",
)  # fmt: skip
JSON_NAME, TABLE_NAME, PICTURE_NAME = "compare.json", "compare.md", "compare.png"
UNKNOWN = "not recorded"


def compare(cfg: ServeRun, console: Console) -> list[dict[str, Any]]:
    """Measures cfg.drafters, leaves compare.json, compare.md and compare.png in output_dir, prints the table.

    Returns the entries, in the order given: a report (report.KEYS) and EXTRA_KEYS each. Raises LosslessError, after
    writing, when an entry's fp32 text differs from plain decoding's.
    """
    drafters = dict(zip(labels(cfg.drafters), cfg.drafters))
    prompts = eval_prompts(cfg.eval)
    found: dict[str, dict[str, Any]] = {}
    for group in by_target(drafters):
        contest = Contest(Target.load(cfg.target), group, prompts, cfg.runtime, cfg.eval, cfg.sampling)
        contest.run(console)
        found |= {name: _entry(contest, name, path) for name, path in group.items()}
    entries = [found[name] for name in drafters]
    out_dir = Path(cfg.output_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    atomic_write_json(out_dir / JSON_NAME, entries)
    atomic_write_text(out_dir / TABLE_NAME, markdown(entries))
    reports.write_bytes(out_dir / PICTURE_NAME, picture(entries))
    console.print(table(entries))
    files = ", ".join(str(out_dir / name) for name in (JSON_NAME, TABLE_NAME, PICTURE_NAME))
    console.print(Text(f"comparison: {files}", style="dim"), soft_wrap=True)
    _check_lossless(entries)
    return entries


def by_target(drafters: dict[str, str]) -> list[dict[str, str]]:
    """Drafters of the target as it is, and of each adapter that some of them tune it by: plain text is theirs alone."""
    groups: dict[str, dict[str, str]] = {}
    for name, path in drafters.items():
        adapter = adapter_of(path)
        groups.setdefault("" if adapter is None else adapter.sha256, {})[name] = path
    return list(groups.values())


def labels(paths: Sequence[str]) -> list[str]:
    """A short name for each: of a folder called export its parent's, of others their own; the paths where two agree."""
    names = ["+".join(_label(part) for part in parse_drafter_path(path)) for path in paths]
    if len(set(names)) < len(names):
        names = [shown(path) for path in paths]
    return [f"./{name}" if name in (PLAIN, PEER) else name for name in names]


def _label(part: DrafterPart) -> str:
    if part.folder is None:
        return part.hub_id or part.kind
    full = part.folder.resolve()
    return full.parent.name if full.name == "export" else full.name


def _entry(contest: Contest, name: str, path: str) -> dict[str, Any]:
    """The entry of one drafter; answers the prompts once more, at temperature 1."""
    report = contest.report(name)
    engine, share = contest.engines[name], report["time_share"]
    warm = Stats()
    for result in engine.generate(contest.ids, contest.params_at(1.0)):
        warm.add(result.stats)
    log.info("compare: %s, tau %.2f at temperature 1", name, warm.acceptance_length)
    facts = [read_training(part.folder) for part in parse_drafter_path(path) if part.folder is not None]
    return {
        "name": name,
        "params": engine.proposer.weights,
        "extra_bytes": memory_bytes(engine.proposer, contest.target),
        "train_tokens": _sum(facts, "train_tokens"),
        "train_minutes": _sum(facts, "train_minutes"),
        "acceptance_length_t1": warm.acceptance_length,
        "draft_share": None if share is None else share["draft"],
        **report,
    }


def _sum(facts: Sequence[TrainingFacts | None], name: str) -> float | None:
    """Of all trained parts together; None where one of them does not say, 0 where nothing was trained."""
    values = [None if each is None else getattr(each, name) for each in facts]
    return None if None in values else sum(values)


def _check_lossless(entries: Sequence[dict[str, Any]]) -> None:
    wrong = []
    for entry in entries:
        try:
            reports.check_lossless(entry)
        except LosslessError as error:
            wrong.append(f"{entry['name']}: {error}")
    if wrong:
        raise LosslessError(" ".join(wrong))


# ---- the table --------------------------------------------------------------------------------------------------

COLUMNS = (
    "drafter", "parameters", "memory, MB", "trained on, tokens", "training, min", "tau", "tau at T=1", "tokens/s",
    "speed-up", "vs transformers", "time drafting", "identical",
)  # fmt: skip


def cells(entry: dict[str, Any]) -> list[str]:
    """One entry's row under COLUMNS."""
    peer, share, same = entry["speedup_vs_transformers"], entry["draft_share"], entry["identical"]
    ties = f" ({entry['near_ties']} near ties)" if entry["near_ties"] else ""
    return [
        entry["name"],
        f"{entry['params']:,}",
        f"{entry['extra_bytes'] / 1e6:.1f}",
        UNKNOWN if entry["train_tokens"] is None else f"{entry['train_tokens']:,}",
        UNKNOWN if entry["train_minutes"] is None else f"{entry['train_minutes']:.1f}",
        f"{entry['acceptance_length']:.2f}",
        f"{entry['acceptance_length_t1']:.2f}",
        f"{entry['tokens_per_s']:.1f}",
        f"{entry['speedup']:.2f}x",
        "not measured" if peer is None else f"{peer:.2f}x",
        "not timed" if share is None else f"{share:.0%}",
        "not checked" if same is None else f"{same}/{entry['prompts']}{ties}",
    ]


def conditions(entries: Sequence[dict[str, Any]]) -> str:
    """How all of them were measured, in one line."""
    first = entries[0]
    machine = first["machine"]
    device = machine["cpu"] if machine["device"] == "cpu" else machine["device"]
    speeds = _speeds(first)
    for each in {entry["target"]: entry for entry in entries if entry["target"] != first["target"]}.values():
        speeds += f"; {each['target']}: {_speeds(each)}"
    where = f"{first['dtype']}, {device}, {machine['threads']} threads"
    return f"{first['prompts']} prompts, temperature 0, {where}; {speeds}"


def _speeds(entry: dict[str, Any]) -> str:
    peer = entry["transformers_tokens_per_s"]
    told = f"plain decoding {entry['plain_tokens_per_s']:.1f} tokens/s"
    return told if peer is None else f"{told}, transformers {peer:.1f} tokens/s"


def table(entries: Sequence[dict[str, Any]]) -> Table:
    """The entries for the terminal."""
    shown_table = Table(title=Text(f"{entries[0]['target']}: {conditions(entries)}"), title_justify="left")
    for number, column in enumerate(COLUMNS):
        shown_table.add_column(column, justify="left" if number == 0 else "right")
    for entry in entries:
        same = entry["identical"]
        wrong = same is not None and same + entry["near_ties"] < entry["prompts"]
        shown_table.add_row(*map(Text, cells(entry)), style="bold red" if wrong else None)
    return shown_table


def markdown(entries: Sequence[dict[str, Any]]) -> str:
    """compare.md: how it was measured, one table, what its columns mean."""
    rows = [COLUMNS, ["---", *["---:"] * (len(COLUMNS) - 1)], *map(cells, entries)]
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    meaning = (
        "tau: tokens emitted per target forward, bonus token included; sums over sums. speed-up: over plain decoding "
        "of the same prompts by the same engine, interleaved in the same run. memory: weights beside the target's, as "
        "laid out. identical: texts at temperature 0 that equal those of plain decoding. A drafter that tunes the "
        "target is held against the tuned target's own."
    )
    return "\n\n".join(
        [
            f"# Drafters for {entries[0]['target']}",
            conditions(entries) + ".",
            "\n".join(lines),
            meaning,
            f"```\n{entries[0]['command']}\n```\n",
        ]
    )
