"""Metrics are on disk whatever W&B does."""

from __future__ import annotations

import json
import os
import sys
import types

import pytest

from drafters.config import LoggerConfig
from drafters.logger import Logger


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def fake_wandb(monkeypatch, fail_at: str | None = None) -> list[tuple]:
    """A wandb module that notes calls and raises at `fail_at`."""
    calls: list[tuple] = []

    def note(name: str, /, *args, **kwargs):
        calls.append((name, args, kwargs))
        if name == fail_at:
            raise RuntimeError("no network")

    run = types.SimpleNamespace(
        log=lambda *a, **k: note("log", *a, **k), finish=lambda *a, **k: note("finish", *a, **k)
    )

    def init(**kwargs):
        note("init", **kwargs)
        return run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return calls


def test_each_call_is_one_line(tmp_path):
    logger = Logger(tmp_path / "run", LoggerConfig(wandb=False))
    logger.log({"train/loss": 1.5}, 1)
    logger.log({"train/loss": float("nan"), "n": 2}, 2)
    logger.close()
    found = lines(tmp_path / "run")
    assert [{k: v for k, v in line.items() if k != "time"} for line in found] == [
        {"step": 1, "train/loss": 1.5}, {"step": 2, "train/loss": None, "n": 2},
    ]  # fmt: skip


def test_nothing_is_made_before_the_first_number(tmp_path, monkeypatch):
    calls = fake_wandb(monkeypatch)
    Logger(tmp_path / "run", LoggerConfig())
    assert not (tmp_path / "run").exists() and calls == []


def test_wandb_gets_the_same_numbers_in_the_output_folder(tmp_path, monkeypatch):
    calls = fake_wandb(monkeypatch)
    logger = Logger(tmp_path / "run", LoggerConfig(project="p"), {"seed": 1})
    logger.log({"a": 1}, 3)
    logger.log({"a": 2}, 4)
    logger.close()
    expected = {"project": "p", "name": "run", "dir": str(tmp_path / "run"), "config": {"seed": 1}}
    assert calls[0] == ("init", (), expected)
    assert [call[1:] for call in calls[1:3]] == [(({"a": 1},), {"step": 3}), (({"a": 2},), {"step": 4})]
    assert calls[3][0] == "finish"


def test_wandb_is_offline_unless_told_otherwise(tmp_path, monkeypatch):
    fake_wandb(monkeypatch)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    Logger(tmp_path, LoggerConfig()).log({"a": 1}, 1)
    assert os.environ["WANDB_MODE"] == "offline"
    monkeypatch.setenv("WANDB_MODE", "online")
    Logger(tmp_path, LoggerConfig()).log({"a": 1}, 1)
    assert os.environ["WANDB_MODE"] == "online"


@pytest.mark.parametrize("point", ["init", "log", "finish"])
def test_a_failing_wandb_is_warned_about_once_and_the_file_goes_on(tmp_path, monkeypatch, caplog, point):
    calls = fake_wandb(monkeypatch, fail_at=point)
    logger = Logger(tmp_path, LoggerConfig())
    for step in (1, 2, 3):
        logger.log({"a": step}, step)
    logger.close()
    assert [line["a"] for line in lines(tmp_path)] == [1, 2, 3]
    assert len([r for r in caplog.records if "no network" in r.message]) == 1
    assert sum(call[0] == point for call in calls) == 1


def test_wandb_off_means_not_even_imported(tmp_path, monkeypatch):
    calls = fake_wandb(monkeypatch)
    Logger(tmp_path, LoggerConfig(wandb=False)).log({"a": 1}, 1)
    assert calls == []


def test_rewind_drops_later_and_torn_lines(tmp_path):
    logger = Logger(tmp_path, LoggerConfig(wandb=False))
    logger.rewind(5)  # nothing there yet
    for step in (1, 2, 3):
        logger.log({"a": step}, step)
    with logger.path.open("a") as file:
        file.write('{"step": 4, "a"')
    logger.rewind(2)
    assert [line["a"] for line in lines(tmp_path)] == [1, 2]
    logger.log({"a": 30}, 3)
    assert [line["a"] for line in lines(tmp_path)] == [1, 2, 30]
