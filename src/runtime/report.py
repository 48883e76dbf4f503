"""The report of an evaluation: report.json, report.png and tables on the console."""

from __future__ import annotations

import io
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from drafters.artifacts import atomic_write_json
from drafters.contract import code_version
from drafters.target import Target
from runtime.identity import LosslessError

# The stable surface: others script against these names.
KEYS = (
    "acceptance_length", "acceptance_at", "rounds", "drafted", "accepted", "emitted",
    "tokens_per_s", "plain_tokens_per_s", "transformers_tokens_per_s", "speedup", "speedup_vs_transformers",
    "identical", "prompts", "near_ties", "target", "drafter", "dtype", "temperature", "command", "versions", "machine",
    "per_prompt",
)  # fmt: skip
JSON_NAME, PICTURE_NAME = "report.json", "report.png"
INK, MUTED, ACCENT, NEUTRAL = "#1f2933", "#6b7785", "#0f766e", "#b8c1cc"


def environment(target: Target) -> dict[str, Any]:
    """Report keys that say how a measurement was made: dtype, command, versions, machine."""
    gpu = target.device.type == "cuda"
    return {
        "dtype": str(target.dtype).removeprefix("torch."),
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "outrider": code_version(),
        },
        "machine": {
            "cpu": _cpu_name(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(target.device) if gpu else "cpu",
        },
    }


def write(report: dict[str, Any], out_dir: Path, console: Console) -> None:
    """Leaves report.json and report.png in out_dir, each whole or absent, and prints the tables."""
    out_dir.mkdir(parents=True, exist_ok=True)
    atomic_write_json(out_dir / JSON_NAME, report)
    _write_bytes(out_dir / PICTURE_NAME, picture(report))
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
    """`identical to plain decoding: N/N`, with what explains the rest."""
    same, total = report["identical"], report["prompts"]
    if same is None:
        return Text("identical to plain decoding: not checked (eval.check_identity=false)", style="yellow")
    line = f"identical to plain decoding: {same}/{total}"
    if same == total:
        return Text(line, style="bold green")
    wrong = total - same - report["near_ties"]
    line += f" (near ties: {report['near_ties']}, unexplained: {wrong})"
    return Text(line, style="bold red" if wrong else "bold yellow")


def _measurements(report: dict[str, Any]) -> Table:
    title = f"{report['drafter']} for {report['target']}: {report['prompts']} prompts, "
    title = Text(title + f"T={report['temperature']:g}, {report['dtype']}")  # as Text: names are not markup
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
    return table


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


# ---- picture ----------------------------------------------------------------------------------------------------


def picture(report: dict[str, Any]) -> bytes:
    """The drawing as PNG, 1500 x 630 pixels."""
    buffer = io.BytesIO()
    draw(report).savefig(buffer, format="png")
    return buffer.getvalue()


def draw(report: dict[str, Any]) -> Figure:
    """Acceptance by depth on the left, tokens per second of the decoders on the right."""
    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(rect=(0.008, 0.01, 0.984, 0.86), wspace=0.06)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    _draw_acceptance(left, report)
    _draw_speed(right, report)
    title = f"{report['drafter']}  on  {report['target']}"
    machine = report["machine"]["cpu"] if report["machine"]["device"] == "cpu" else report["machine"]["device"]
    note = f"{report['prompts']} prompts, temperature {report['temperature']:g}, {report['dtype']}, {machine}"
    figure.text(0.015, 0.935, title, color=INK, fontsize=13, weight="bold")
    figure.text(0.015, 0.885, note, color=MUTED, fontsize=8.5)
    return figure


def _draw_acceptance(axes: Axes, report: dict[str, Any]) -> None:
    shares = report["acceptance_at"]
    _frame(axes, f"Acceptance length  {report['acceptance_length']:.2f}")
    if not shares:
        axes.text(0.5, 0.5, "nothing was drafted", color=MUTED, ha="center", va="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
        return
    depths = range(1, len(shares) + 1)
    bars = axes.bar(depths, [100 * share for share in shares], color=ACCENT, width=0.62)
    axes.bar_label(bars, [f"{share:.0%}" for share in shares], padding=3, color=INK, fontsize=9)
    axes.set(ylim=(0, 108), yticks=range(0, 101, 25), xticks=list(depths), xlabel="depth of the drafted token")
    axes.set_ylabel("rounds that accepted it, %")
    axes.grid(axis="y", color="#e5e9ee", linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_speed(axes: Axes, report: dict[str, Any]) -> None:
    bars = [
        ("transformers\ngenerate", report["transformers_tokens_per_s"], NEUTRAL),
        ("plain decoding", report["plain_tokens_per_s"], NEUTRAL),
        ("with drafter", report["tokens_per_s"], ACCENT),
    ]
    bars = [bar for bar in bars if bar[1] is not None]
    _frame(axes, f"Speed  {report['speedup']:.2f}x plain decoding")
    names, speeds, colours = zip(*bars)
    drawn = axes.barh(range(len(bars)), speeds, color=colours, height=0.58)
    ratios = [speed / report["plain_tokens_per_s"] for speed in speeds]
    labels = [f"{speed:.1f}   ({ratio:.2f}x)" for speed, ratio in zip(speeds, ratios)]
    axes.bar_label(drawn, labels, padding=5, color=INK, fontsize=9.5)
    axes.set(yticks=range(len(bars)), xlim=(0, 1.3 * max(speeds)), ylim=(-0.6, len(bars) - 0.4))
    axes.set_yticklabels(names, color=INK)
    axes.set_xlabel("tokens per second, prompt included (ratio to plain decoding)")
    axes.grid(axis="x", color="#e5e9ee", linewidth=0.8)
    axes.set_axisbelow(True)


def _frame(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=11, pad=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c4ccd4")
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.xaxis.label.set_color(MUTED)
    axes.yaxis.label.set_color(MUTED)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)


# ---- parts ------------------------------------------------------------------------------------------------------


def _write_bytes(path: Path, data: bytes) -> None:
    temp = path.with_name(f".{path.name}.tmp")
    temp.write_bytes(data)
    os.replace(temp, path)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")  # platform.processor() is empty on most Linux systems
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
