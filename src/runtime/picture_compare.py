"""The picture of a comparison."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from runtime.picture import ACCENT, ALARM, GRID, INK, MUTED, NEUTRAL, frame, say

COLOURS = (ACCENT, "#d97706", "#4f6d8f", "#9d4edd", "#b91c1c", "#65a30d", "#0891b2", "#6b7785")
LINES = ("-", "--", ":")  # once the colours begin again


def picture(entries: Sequence[dict[str, Any]]) -> bytes:
    """The drawing as PNG, 1500 pixels wide, taller with more entries."""
    buffer = io.BytesIO()
    draw(entries).savefig(buffer, format="png")
    return buffer.getvalue()


def draw(entries: Sequence[dict[str, Any]]) -> Figure:
    """Above: speed-up over plain decoding, tau at both temperatures. Below: acceptance by depth, a line each."""
    bars = 0.9 + 0.42 * len(entries)
    figure = Figure(figsize=(10, bars + 4.2), dpi=150, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(rect=(0.008, 0.01, 0.984, 0.985 - 0.7 / (bars + 4.2)), wspace=0.05, hspace=0.06)
    grid = figure.add_gridspec(2, 2, height_ratios=(bars, 2.9))
    _draw_speed(figure.add_subplot(grid[0, 0]), entries)
    _draw_tau(figure.add_subplot(grid[0, 1]), entries)
    _draw_depths(figure.add_subplot(grid[1, :]), entries)
    first = entries[0]
    machine = first["machine"]["cpu"] if first["machine"]["device"] == "cpu" else first["machine"]["device"]
    top = 1 - 0.28 / (bars + 4.2)
    figure.text(0.015, top, f"Drafters for {first['target']}", color=INK, fontsize=13, weight="bold")
    note = f"{first['prompts']} prompts, {first['dtype']}, {machine}"
    figure.text(0.015, top - 0.22 / (bars + 4.2), note, color=MUTED, fontsize=8.5)
    return figure


def _draw_speed(axes: Axes, entries: Sequence[dict[str, Any]]) -> None:
    frame(axes, "Speed-up over plain decoding")
    values = [entry["speedup"] for entry in entries]
    # Slower than plain decoding is what nobody should overlook.
    drawn = axes.barh(range(len(entries)), values, color=[ACCENT if v >= 1 else ALARM for v in values], height=0.58)
    labels = [f"{entry['speedup']:.2f}x   {entry['tokens_per_s']:.1f} tokens/s" for entry in entries]
    axes.bar_label(drawn, labels, padding=4, color=INK, fontsize=9)
    axes.axvline(1.0, color=MUTED, linewidth=0.9, linestyle="--")
    axes.set(xlim=(0, 1.75 * max(1.0, *values)))
    _name_rows(axes, entries)


def _draw_tau(axes: Axes, entries: Sequence[dict[str, Any]]) -> None:
    frame(axes, "Acceptance length (tau)")
    pairs = (("acceptance_length", ACCENT, -0.2, "temperature 0"), ("acceptance_length_t1", NEUTRAL, 0.2, "1"))
    for key, colour, shift, label in pairs:
        places = [row + shift for row in range(len(entries))]
        drawn = axes.barh(places, [entry[key] for entry in entries], color=colour, height=0.36, label=label)
        axes.bar_label(drawn, [f"{entry[key]:.2f}" for entry in entries], padding=4, color=INK, fontsize=8.5)
    longest = max(max(entry["acceptance_length"], entry["acceptance_length_t1"]) for entry in entries)
    axes.set(xlim=(0, 1.3 * longest))
    _name_rows(axes, entries)
    # Beside the title: among the bars it would lie on one of them.
    corner = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": 2, "borderaxespad": 0.2}
    axes.legend(frameon=False, fontsize=8.5, labelcolor=MUTED, **corner)


def _name_rows(axes: Axes, entries: Sequence[dict[str, Any]]) -> None:
    axes.set(yticks=range(len(entries)), ylim=(len(entries) - 0.4, -0.6))
    axes.set_yticklabels([entry["name"] for entry in entries], color=INK)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_depths(axes: Axes, entries: Sequence[dict[str, Any]]) -> None:
    frame(axes, "Acceptance by depth")
    drafting = [entry for entry in entries if entry["acceptance_at"]]
    if not drafting:
        return say(axes, "nothing was drafted")
    for number, entry in enumerate(drafting):
        shares = [100 * share for share in entry["acceptance_at"]]
        colour, line = COLOURS[number % len(COLOURS)], LINES[number // len(COLOURS) % len(LINES)]
        axes.plot(
            range(1, len(shares) + 1), shares, color=colour, ls=line, marker="o", markersize=4, label=entry["name"]
        )
    deepest = max(len(entry["acceptance_at"]) for entry in drafting)
    axes.set(ylim=(0, 105), xticks=range(1, deepest + 1), xlabel="depth of the drafted token")
    axes.set_ylabel("rounds that accepted it, %")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK)
