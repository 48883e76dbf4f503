"""The report of an evaluation: report.json, report.png and tables on the console."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from rich.text import Text

from drafters.artifacts import atomic_write_json
from drafters.contract import code_version
from drafters.target import Target
from runtime.cost_table import machine
from runtime.identity import LosslessError
from runtime.picture import picture

# The stable surface: others script against these names.
KEYS = (
    "acceptance_length", "acceptance_at", "rounds", "drafted", "accepted", "emitted",
    "tokens_per_s", "plain_tokens_per_s", "transformers_tokens_per_s", "speedup", "speedup_vs_transformers",
    "identical", "prompts", "near_ties", "time_share", "latency_ms", "by_proposer", "chosen_n", "predicted",
    "target", "drafter", "dtype", "temperature", "verification", "lossy", "command", "versions", "machine",
    "per_prompt",
)  # fmt: skip
JSON_NAME, PICTURE_NAME = "report.json", "report.png"


def environment(target: Target) -> dict[str, Any]:
    """Report keys that say how a measurement was made: dtype, command, versions, machine."""
    return {
        "dtype": str(target.dtype).removeprefix("torch."),
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "outrider": code_version(),
        },
        "machine": machine(target.device),
    }


def write(report: dict[str, Any], out_dir: Path, console: Console) -> None:
    """Leaves report.json and report.png in out_dir, each whole or absent, and prints the tables."""
    out_dir.mkdir(parents=True, exist_ok=True)
    atomic_write_json(out_dir / JSON_NAME, report)
    write_bytes(out_dir / PICTURE_NAME, picture(report))
    show(report, console)
    console.print(Text(f"report: {out_dir / JSON_NAME}, {out_dir / PICTURE_NAME}", style="dim"), soft_wrap=True)


def check_lossless(report: dict[str, Any]) -> None:
    """Raises LosslessError when an fp32 text differs from plain decoding's and no near tie explains it."""
    if report["identical"] is None or report["dtype"] != "float32":
        return
    wrong = report["prompts"] - report["identical"] - report["near_ties"]
    if wrong:
        raise LosslessError(
            f"lossless check failed: {wrong} of {report['prompts']} answers differ from plain decoding and no near tie "
            "explains it. Each is in the log with its position and margin. This is a fault in the runtime; "
            "set drafter.path=none until it is fixed."
        )


# ---- console ----------------------------------------------------------------------------------------------------


def show(report: dict[str, Any], console: Console) -> None:
    """Prints the measurements, tau by category, and how many texts equal plain decoding's."""
    console.print(_measurements(report))
    console.print(_categories(report["per_prompt"]))
    console.print(identity_line(report), soft_wrap=True, highlight=False)


def identity_line(report: dict[str, Any]) -> Text:
    """`identical to plain decoding: N/N`, with what explains the rest, or why texts were not compared."""
    same, total = report["identical"], report["prompts"]
    if report["lossy"]:
        return Text(
            f"LOSSY: verification={report['verification']} lets tokens pass the target would not say", "bold red"
        )
    if same is None and report["verification"] == "rejection" and report["temperature"]:
        return Text("the distribution of plain decoding, not its text (verification=rejection): not compared", "yellow")
    if same is None:
        return Text("identical to plain decoding: not checked (eval.check_identity=false)", style="yellow")
    line = f"identical to plain decoding: {same}/{total}"
    if same == total:
        return Text(line, style="bold green")
    wrong = total - same - report["near_ties"]
    line += f" (near ties: {report['near_ties']}, unexplained: {wrong})"
    return Text(line, style="bold red" if wrong else "bold yellow")


def rule_name(report: dict[str, Any]) -> str:
    """The rule drafts were accepted by, as reports name it."""
    return f"{report['verification']}, LOSSY" if report["lossy"] else report["verification"]


def _measurements(report: dict[str, Any]) -> Table:
    title = f"{report['drafter']} for {report['target']}: {report['prompts']} prompts, "
    title = Text(title + f"T={report['temperature']:g}, {report['dtype']}, {rule_name(report)}")  # names are no markup
    table = Table(title=title, title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_column("meaning", style="dim")
    counts = f"{report['emitted']} tokens / {report['rounds']} target forwards"
    table.add_row("acceptance length (tau)", f"[bold]{report['acceptance_length']:.2f}[/]", counts)
    for depth, share in enumerate(report["acceptance_at"], start=1):
        table.add_row(f"accepted at depth {depth}", f"{share:.1%}", "of rounds")
    table.add_row("tokens/s", f"[bold]{report['tokens_per_s']:.1f}[/]", "prompt included")
    table.add_row("plain decoding", f"{report['plain_tokens_per_s']:.1f}", f"speed-up {report['speedup']:.2f}x")
    peer, ratio = report["transformers_tokens_per_s"], report["speedup_vs_transformers"]
    if peer is not None:
        table.add_row("transformers.generate", f"{peer:.1f}", f"speed-up {ratio:.2f}x")
    _add_where_time_went(table, report)
    return table


def _add_where_time_went(table: Table, report: dict[str, Any]) -> None:
    latency, shares, predicted = report["latency_ms"], report["time_share"], report["predicted"]
    if latency is not None:
        values = " / ".join(f"{latency[name]:.1f}" for name in ("p50", "p95", "p99"))
        table.add_row("ms per token", values, "p50 / p95 / p99, prompt not included")
    if shares is not None:
        values = " / ".join(f"{share:.0%}" for share in shares.values())
        table.add_row("time of a round", values, " / ".join(shares))
    for name, counts in report["by_proposer"].items():
        share = counts["accepted"] / counts["drafted"]
        table.add_row(
            Text(f"accepted of {name}"), f"{share:.1%}", f"{counts['accepted']} of {counts['drafted']} drafts"
        )
    if len(report["chosen_n"]) > 1:
        often = sorted(report["chosen_n"].items(), key=lambda item: -item[1])[:4]
        values = ", ".join(f"{n}: {count / report['rounds']:.0%}" for n, count in often)
        table.add_row("drafts per round", values, "most frequent sizes; 0: plain")
    if predicted is not None:
        table.add_row("tokens expected", f"{predicted['expected']:.0f}", f"by the cost model; got {predicted['got']}")


def _categories(per_prompt: list[dict[str, Any]]) -> Table:
    table = Table("category", title="by category", title_justify="left")
    for name in ("prompts", "tau", "speed-up"):
        table.add_column(name, justify="right")
    for category in sorted({row["category"] for row in per_prompt}):
        rows = [row for row in per_prompt if row["category"] == category]
        rounds = sum(row["rounds"] for row in rows)
        tau = sum(row["emitted"] for row in rows) / rounds if rounds else 0.0
        # The same tokens on both sides but for near ties, so seconds alone give the ratio.
        ratio = sum(row["plain_seconds"] for row in rows) / sum(row["seconds"] for row in rows)
        table.add_row(Text(category), str(len(rows)), f"{tau:.2f}", f"{ratio:.2f}x")
    return table


# ---- parts ------------------------------------------------------------------------------------------------------


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file so that it is whole or absent."""
    temp = path.with_name(f".{path.name}.tmp")
    temp.write_bytes(data)
    os.replace(temp, path)
