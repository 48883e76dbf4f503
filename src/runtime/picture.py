"""The picture of an evaluation."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, ACCENT, NEUTRAL = "#1f2933", "#6b7785", "#0f766e", "#b8c1cc"
GRID, ALARM = "#e5e9ee", "#b91c1c"
PARTS = {"draft": "#d97706", "verify": ACCENT, "sample": "#4f6d8f", "rest": NEUTRAL}


def picture(report: dict[str, Any]) -> bytes:
    """The drawing as PNG, 1500 x 1080 pixels."""
    buffer = io.BytesIO()
    draw(report).savefig(buffer, format="png")
    return buffer.getvalue()


def draw(report: dict[str, Any]) -> Figure:
    """Above: acceptance by depth, speed of the decoders. Below: drafts per round, where time went, by proposer."""
    figure = Figure(figsize=(10, 7.2), dpi=150, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(rect=(0.008, 0.01, 0.984, 0.91), wspace=0.06, hspace=0.08)
    grid = figure.add_gridspec(2, 9, height_ratios=(1.25, 1))
    _draw_acceptance(figure.add_subplot(grid[0, :4]), report)
    _draw_speed(figure.add_subplot(grid[0, 4:]), report)
    _draw_sizes(figure.add_subplot(grid[1, :3]), report)
    _draw_time(figure.add_subplot(grid[1, 3:6]), report)
    _draw_proposers(figure.add_subplot(grid[1, 6:]), report)
    title = f"{report['drafter']}  on  {report['target']}"
    machine = report["machine"]["cpu"] if report["machine"]["device"] == "cpu" else report["machine"]["device"]
    note = f"{report['prompts']} prompts, temperature {report['temperature']:g}, {report['dtype']}, {machine}"
    figure.text(0.015, 0.962, title, color=INK, fontsize=13, weight="bold")
    figure.text(0.015, 0.932, note, color=MUTED, fontsize=8.5)
    if report["lossy"]:
        label = f"LOSSY  verification={report['verification']}"
        figure.text(0.985, 0.962, label, color=ALARM, fontsize=11, weight="bold", ha="right")
    return figure


def _draw_acceptance(axes: Axes, report: dict[str, Any]) -> None:
    shares = report["acceptance_at"]
    frame(axes, f"Acceptance length  {report['acceptance_length']:.2f}")
    if not shares:
        return say(axes, "nothing was drafted")
    depths = range(1, len(shares) + 1)
    bars = axes.bar(depths, [100 * share for share in shares], color=ACCENT, width=0.62)
    axes.bar_label(bars, [f"{share:.0%}" for share in shares], padding=3, color=INK, fontsize=9)
    axes.set(ylim=(0, 108), yticks=range(0, 101, 25), xticks=list(depths), xlabel="depth of the drafted token")
    axes.set_ylabel("rounds that accepted it, %")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_speed(axes: Axes, report: dict[str, Any]) -> None:
    bars = [
        ("transformers\ngenerate", report["transformers_tokens_per_s"], NEUTRAL),
        ("plain decoding", report["plain_tokens_per_s"], NEUTRAL),
        ("with drafter", report["tokens_per_s"], ACCENT),
    ]
    bars = [bar for bar in bars if bar[1] is not None]
    frame(axes, f"Speed  {report['speedup']:.2f}x plain decoding")
    names, speeds, colours = zip(*bars)
    drawn = axes.barh(range(len(bars)), speeds, color=colours, height=0.58)
    ratios = [speed / report["plain_tokens_per_s"] for speed in speeds]
    labels = [f"{speed:.1f}   ({ratio:.2f}x)" for speed, ratio in zip(speeds, ratios)]
    axes.bar_label(drawn, labels, padding=5, color=INK, fontsize=9.5)
    axes.set(yticks=range(len(bars)), xlim=(0, 1.3 * max(speeds)), ylim=(-0.6, len(bars) - 0.4))
    axes.set_yticklabels(names, color=INK)
    axes.set_xlabel("tokens per second, prompt included (ratio to plain decoding)")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_sizes(axes: Axes, report: dict[str, Any]) -> None:
    frame(axes, "Drafts per round")
    if not report["chosen_n"]:
        return say(axes, "no round was run")
    sizes = list(report["chosen_n"])
    shares = [100 * count / report["rounds"] for count in report["chosen_n"].values()]
    axes.bar(range(len(sizes)), shares, color=[NEUTRAL if n == "0" else ACCENT for n in sizes], width=0.72)
    step = -(-len(sizes) // 10)  # no more labels than there is room for
    axes.set(ylim=(0, 1.12 * max(shares)), xlabel="drafted tokens (0: plain decoding)", ylabel="rounds, %")
    axes.set_xticks(range(0, len(sizes), step), sizes[::step])
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_time(axes: Axes, report: dict[str, Any]) -> None:
    latency = report["latency_ms"]
    frame(axes, "Time of a round" if latency is None else f"Time  {latency['p50']:.1f} ms per token")
    if report["time_share"] is None:
        return say(axes, "not timed")
    shares = {name: 100 * share for name, share in report["time_share"].items()}
    bars = axes.barh(range(len(shares)), shares.values(), color=[PARTS[name] for name in shares], height=0.58)
    axes.bar_label(bars, [f"{share:.0f}%" for share in shares.values()], padding=4, color=INK, fontsize=9)
    axes.set(yticks=range(len(shares)), xlim=(0, 1.2 * max(shares.values())), ylim=(len(shares) - 0.4, -0.6))
    axes.set_yticklabels(shares, color=INK)
    axes.set_xlabel("" if latency is None else f"share, %  (p95 {latency['p95']:.1f}, p99 {latency['p99']:.1f} ms)")


def _draw_proposers(axes: Axes, report: dict[str, Any]) -> None:
    frame(axes, "Accepted by proposer")
    counts = report["by_proposer"]
    if not counts:
        return say(axes, "no draft of a named proposer")
    shares = [100 * each["accepted"] / each["drafted"] for each in counts.values()]
    bars = axes.barh(range(len(counts)), shares, color=ACCENT, height=0.58)
    labels = [f"{share:.1f}%  of {each['drafted']}" for share, each in zip(shares, counts.values())]
    axes.bar_label(bars, labels, padding=4, color=INK, fontsize=9)
    axes.set(yticks=range(len(counts)), xlim=(0, max(1.0, 2.2 * max(shares))), ylim=(len(counts) - 0.4, -0.6))
    axes.set_yticklabels(counts, color=INK)
    axes.set_xlabel("drafts the target accepted, %")


def say(axes: Axes, text: str) -> None:
    """Puts words where a drawing would be."""
    axes.text(0.5, 0.5, text, color=MUTED, ha="center", va="center", transform=axes.transAxes)
    axes.set(xticks=[], yticks=[])


def frame(axes: Axes, title: str) -> None:
    """Title, spines and ticks of one part of the picture."""
    axes.set_title(title, loc="left", color=INK, fontsize=11, pad=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c4ccd4")
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.xaxis.label.set_color(MUTED)
    axes.yaxis.label.set_color(MUTED)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
