"""report.json's stable surface, the tables, the picture, and the verdict on losslessness."""

from __future__ import annotations

import json
import os
import shlex
import struct
import sys

import pytest
import torch
import transformers
from rich.console import Console

from runtime import picture as pictures
from runtime import report as reports
from runtime.identity import LosslessError

SURFACE = [
    "acceptance_length", "acceptance_at", "rounds", "drafted", "accepted", "emitted", "tokens_per_s",
    "plain_tokens_per_s", "transformers_tokens_per_s", "speedup", "speedup_vs_transformers", "identical", "prompts",
    "near_ties", "time_share", "latency_ms", "by_proposer", "chosen_n", "predicted", "target", "drafter", "dtype",
    "temperature", "verification", "lossy", "command", "versions", "machine", "per_prompt",
]  # fmt: skip
ROW_SURFACE = [
    "id", "category", "rounds", "drafted", "accepted", "emitted", "acceptance_length", "tokens", "seconds",
    "plain_seconds", "transformers_seconds", "identical", "text",
]  # fmt: skip


def row(name: str, category: str, rounds: int, emitted: int, seconds: float, plain: float) -> dict:
    values = [name, category, rounds, 4 * rounds, emitted - rounds, emitted, emitted / rounds, emitted + 1, seconds]
    return dict(zip(ROW_SURFACE, [*values, plain, 2 * plain, True, "text"], strict=True))


def sample(**changes) -> dict:
    rows = [row("a", "code", 10, 30, 1.0, 2.0), row("b", "chat", 20, 22, 1.0, 1.5), row("c", "code", 5, 8, 1.0, 1.0)]
    report = {
        "acceptance_length": 60 / 35, "acceptance_at": [0.5, 0.25], "rounds": 35, "drafted": 140, "accepted": 25,
        "emitted": 60, "tokens_per_s": 21.0, "plain_tokens_per_s": 14.0, "transformers_tokens_per_s": 7.0,
        "speedup": 1.5, "speedup_vs_transformers": 3.0, "identical": 3, "prompts": 3, "near_ties": 0, "target": "tiny",
        "drafter": "outputs/x/export", "dtype": "float32", "temperature": 0.0, "verification": "coupled",
        "lossy": False, "time_share": {"draft": 0.2, "verify": 0.6, "sample": 0.15, "rest": 0.05},
        "latency_ms": {"p50": 40.0, "p95": 90.0, "p99": 101.5}, "chosen_n": {"0": 7, "4": 14, "12": 14},
        "by_proposer": {"eagle3": {"drafted": 100, "accepted": 20}, "suffix": {"drafted": 40, "accepted": 5}},
        "predicted": {"expected": 57.4, "got": 60}, "command": "python serve.py",
        "versions": {}, "machine": {"cpu": "a CPU", "threads": 1, "device": "cpu"}, "per_prompt": rows,
    }  # fmt: skip
    return report | changes


def printed(report: dict) -> str:
    console = Console(record=True, width=120)
    reports.show(report, console)
    return console.export_text()


def cells(text: str, first: str) -> list[str]:
    """Cells of the table line that begins with `first`."""
    line = next(line for line in text.splitlines() if first in line)
    return [cell.strip() for cell in line.replace("│", "|").replace("┃", "|").strip("| ").split("|")]


def test_the_stable_surface(tiny_target):
    from drafters.config import EvalConfig, RuntimeConfig, SamplingConfig
    from drafters.corpus import Prompt
    from runtime.evaluate import measure

    prompts = [Prompt("a", "chat", ({"role": "user", "content": "hi"},))]
    settings = EvalConfig(max_new_tokens=3)
    report = measure(tiny_target, "ngram", prompts, RuntimeConfig(num_draft_tokens=16), settings, SamplingConfig())
    assert list(report) == SURFACE
    assert list(report["per_prompt"][0]) == ROW_SURFACE


def test_how_it_was_measured(tiny_target, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/serve.py", "eval.prompts=my file.jsonl"])
    found = reports.environment(tiny_target)
    assert found["command"] == "python serve.py 'eval.prompts=my file.jsonl'"
    assert shlex.split(found["command"])[2:] == sys.argv[1:]
    assert found["versions"].keys() == {"python", "torch", "transformers", "outrider"}
    assert (found["versions"]["torch"], found["versions"]["transformers"]) == (
        torch.__version__,
        transformers.__version__,
    )
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert found["machine"]["device"] == "cpu" and found["machine"]["cpu"]
    assert found["dtype"] == "float32"


def test_files_are_written_whole(tmp_path):
    out = tmp_path / "new" / "folder"
    reports.write(sample(), out, Console(record=True))
    assert json.loads((out / "report.json").read_text()) == sample()
    assert sorted(os.listdir(out)) == ["report.json", "report.png"]


def test_a_report_with_nothing_to_compare_is_written_too(tmp_path):
    missing = {"transformers_tokens_per_s": None, "speedup_vs_transformers": None, "acceptance_at": []}
    missing |= {"time_share": None, "latency_ms": None, "by_proposer": {}, "chosen_n": {}, "predicted": None}
    report = sample(identical=None, near_ties=None, **missing)
    console = Console(record=True, width=120)
    reports.write(report, tmp_path, console)
    text = console.export_text()
    assert "not checked (eval.check_identity=false)" in text
    assert "transformers" not in text
    assert not any(row in text for row in ("ms per token", "time of a round", "accepted of", "drafts per", "expected"))


def test_tables():
    text = printed(sample())
    assert cells(text, "acceptance length (tau)") == [
        "acceptance length (tau)",
        "1.71",
        "60 tokens / 35 target forwards",
    ]
    assert cells(text, "accepted at depth 1")[1] == "50.0%" and cells(text, "accepted at depth 2")[1] == "25.0%"
    assert cells(text, "tokens/s")[1] == "21.0"
    assert cells(text, "plain decoding")[1:] == ["14.0", "speed-up 1.50x"]
    assert cells(text, "transformers.generate")[1:] == ["7.0", "speed-up 3.00x"]
    assert cells(text, "ms per token")[1:] == ["40.0 / 90.0 / 101.5", "p50 / p95 / p99, prompt not included"]
    assert cells(text, "time of a round")[1:] == ["20% / 60% / 15% / 5%", "draft / verify / sample / rest"]
    assert cells(text, "accepted of eagle3")[1:] == ["20.0%", "20 of 100 drafts"]
    assert cells(text, "accepted of suffix")[1:] == ["12.5%", "5 of 40 drafts"]
    assert cells(text, "drafts per round")[1:] == ["4: 40%, 12: 40%, 0: 20%", "most frequent sizes; 0: plain"]
    assert cells(text, "tokens expected")[1:] == ["57", "by the cost model; got 60"]


def test_a_lossy_rule_is_labelled_wherever_a_report_shows(tmp_path):
    report = sample(verification="typical", lossy=True, identical=None, near_ties=None)
    console = Console(record=True, width=120)
    reports.write(report, tmp_path, console)
    text = console.export_text()
    assert "float32, typical, LOSSY" in text
    assert "LOSSY: verification=typical lets tokens pass the target would not say" in text
    assert "identical to plain" not in text
    written = json.loads((tmp_path / "report.json").read_text())
    assert (written["verification"], written["lossy"]) == ("typical", True)
    assert "LOSSY  verification=typical" in [text.get_text() for text in pictures.draw(report).texts]
    assert not [text for text in pictures.draw(sample()).texts if "LOSSY" in text.get_text()]
    assert "LOSSY" not in printed(sample())


def test_rejection_keeps_the_distribution_and_is_said_to():
    sampled = {"verification": "rejection", "temperature": 1.0, "identical": None, "near_ties": None}
    assert "the distribution of plain decoding, not its text (verification=rejection)" in printed(sample(**sampled))
    greedy = sample(verification="rejection")
    assert printed(greedy).splitlines()[-1] == "identical to plain decoding: 3/3"


def test_categories_are_sums_over_sums():
    text = printed(sample())
    # code: 38 tokens in 15 rounds, where the mean of both prompts would say 2.30; 3 s against 2 s.
    assert cells(text, "code") == ["code", "2", "2.53", "1.50x"]
    assert cells(text, "chat") == ["chat", "1", "1.10", "1.50x"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "identical to plain decoding: 3/3"),
        ({"identical": 2, "near_ties": 1}, "identical to plain decoding: 2/3 (near ties: 1, unexplained: 0)"),
        ({"identical": 0, "near_ties": 1}, "identical to plain decoding: 0/3 (near ties: 1, unexplained: 2)"),
    ],
)
def test_identity_line(changes, line):
    assert printed(sample(**changes)).splitlines()[-1] == line


def test_a_category_in_brackets_is_text_not_markup():
    rows = [row("a", "[red]", 1, 2, 1.0, 1.0)]
    assert "[red]" in printed(sample(per_prompt=rows))
    assert "[bold]x" in printed(sample(drafter="[bold]x"))


def test_an_unexplained_difference_fails_in_fp32_only():
    reports.check_lossless(sample())
    reports.check_lossless(sample(identical=2, near_ties=1))
    reports.check_lossless(sample(identical=None, near_ties=None))
    reports.check_lossless(sample(identical=1, near_ties=0, dtype="bfloat16"))
    with pytest.raises(LosslessError, match="1 of 3 answers differ from plain decoding"):
        reports.check_lossless(sample(identical=1, near_ties=1))


def test_picture_is_a_png_of_a_fixed_size():
    data = pictures.picture(sample())
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1500, 1080)


def labels(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_picture_shows_the_numbers():
    left, right, sizes, time, proposers = pictures.draw(sample()).axes
    assert [bar.get_height() for bar in left.patches] == [50.0, 25.0]
    assert [bar.get_width() for bar in right.patches] == [7.0, 14.0, 21.0]
    assert labels(right) == ["7.0   (0.50x)", "14.0   (1.00x)", "21.0   (1.50x)"]
    assert labels(left) == ["50%", "25%"]
    assert [bar.get_height() for bar in sizes.patches] == [20.0, 40.0, 40.0]
    assert [text.get_text() for text in sizes.get_xticklabels()] == ["0", "4", "12"]
    assert [bar.get_width() for bar in time.patches] == [20.0, 60.0, 15.0, 5.0]
    assert time.get_title(loc="left") == "Time  40.0 ms per token"
    assert time.get_xlabel() == "share, %  (p95 90.0, p99 101.5 ms)"
    assert labels(proposers) == ["20.0%  of 100", "12.5%  of 40"]
    assert [text.get_text() for text in proposers.get_yticklabels()] == ["eagle3", "suffix"]


def test_picture_says_what_is_missing():
    missing = {"transformers_tokens_per_s": None, "acceptance_at": [], "time_share": None, "latency_ms": None}
    left, right, sizes, time, proposers = pictures.draw(sample(**missing, by_proposer={}, chosen_n={})).axes
    assert [bar.get_width() for bar in right.patches] == [14.0, 21.0]
    assert [labels(axes) for axes in (left, sizes, time, proposers)] == [
        ["nothing was drafted"], ["no round was run"], ["not timed"], ["no draft of a named proposer"],
    ]  # fmt: skip
