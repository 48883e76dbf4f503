"""The main job on the random target, as a user runs it: distill, train, kill, go on, serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime.report import KEYS

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("cache"))
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    # Training in this process, as other tests do, describes its process group in the environment.
    group = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in group}
    return kept | {"OUTRIDER_CACHE": cache, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "PYTHONPATH": path}


def run(env, script: str, *settings: str, fails: int = 0) -> str:
    command = [sys.executable, str(ROOT / script), *settings]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT)
    assert done.returncode == fails, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(env, tmp_path_factory) -> Path:
    """distill.py, then train.py on what it collected."""
    base = tmp_path_factory.mktemp("run")
    run(env, "distill.py", "experiment=tiny", f"output_dir={base}/answers")
    run(env, "train.py", "experiment=tiny", f"data.responses={base}/answers", f"output_dir={base}/train")
    return base


def test_distill_leaves_records_and_a_manifest(trained):
    records = [json.loads(line) for line in (trained / "answers" / "responses.jsonl").read_text().splitlines()]
    manifest = json.loads((trained / "answers" / "manifest.json").read_text())
    assert len(records) == manifest["counts"]["records"] == 8 - manifest["counts"]["dropped_too_long"]
    assert sum(len(r["response_ids"]) for r in records) == manifest["counts"]["response_tokens"]


def test_train_leaves_an_export_and_a_full_report(trained):
    report = json.loads((trained / "train" / "report.json").read_text())
    assert set(report) == set(KEYS)
    assert report["identical"] == report["prompts"] == 2
    # an end id inside an accepted path cuts the round's own token, at most once per prompt
    assert 0 <= report["accepted"] + report["rounds"] - report["emitted"] <= report["prompts"]
    for name in ("model.safetensors", "config.json", "contract.json", "probe.safetensors", "README.md"):
        assert (trained / "train" / "export" / name).is_file()
    facts = json.loads((trained / "train" / "export" / "training.json").read_text())
    manifest = json.loads((trained / "answers" / "manifest.json").read_text())
    # Four steps of one row, two of which hold all answers: each was trained on twice.
    assert (facts["steps"], facts["distinct_tokens"]) == (4, manifest["counts"]["response_tokens"])
    assert facts["train_tokens"] == 2 * facts["distinct_tokens"] and facts["train_minutes"] > 0


def test_doctor_reads_the_runs_own_settings_and_leaves_its_findings_there(env, trained):
    settings = (trained / "train" / "config.yaml").read_bytes()
    # Another target and drafter are the command line's defaults: what the run says of itself holds.
    out = run(env, "train.py", f"doctor={trained}/train", "eval.num_prompts=2", "eval.max_new_tokens=8",
              f"output_dir={trained}/doctor")  # fmt: skip
    findings = json.loads((trained / "train" / "doctor.json").read_text())["findings"]
    assert all(finding["cause"] in out and finding["evidence"] and finding["advice"] for finding in findings)
    assert (trained / "train" / "config.yaml").read_bytes() == settings


def test_serve_measures_the_export_and_refuses_a_changed_one(env, trained, tmp_path):
    export = trained / "train" / "export"
    common = ("experiment=tiny", f"output_dir={tmp_path}")
    out = run(env, "serve.py", f"drafter.path={export}", *common)
    assert "identical to plain decoding: 2/2" in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report) == set(KEYS)
    weights = bytearray((export / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in export.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(weights)
    assert "model.safetensors" in run(env, "serve.py", f"drafter.path={broken}", *common, fails=1)


def test_serve_generates_from_a_prompt(env, trained):
    export = trained / "train" / "export"
    out = run(env, "serve.py", "mode=generate", "prompt=hello", f"drafter.path={export}", "experiment=tiny",
              f"output_dir={trained}/generate")  # fmt: skip
    assert "tokens/s" in out


def test_a_training_run_killed_at_step_10_of_20_ends_like_one_that_was_not(env, trained, tmp_path):
    """A real SIGKILL; the export's weights and every logged loss are equal bit for bit."""
    settings = ("experiment=tiny", f"data.responses={trained}/answers", "trainer.max_steps=20", "trainer.save_every=5",
                "trainer.eval_every=100")  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(env, "train.py", *settings, f"output_dir={whole}")
    command = [sys.executable, str(ROOT / "train.py"), *settings, f"output_dir={killed}"]
    log = killed / "metrics.jsonl"
    process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (log.exists() and len(log.read_text().splitlines()) >= 10):
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -9, "the run ended before it could be killed"
    assert not (killed / "export").exists()
    run(env, "train.py", *settings, f"output_dir={killed}")
    weights = [(folder / "export" / "model.safetensors").read_bytes() for folder in (whole, killed)]
    assert weights[0] == weights[1]
    losses = [
        {row["step"]: row["train/loss"] for row in map(json.loads, text.splitlines()) if "train/loss" in row}
        for text in ((whole / "metrics.jsonl").read_text(), log.read_text())
    ]
    assert losses[0] == losses[1]
    assert sorted(losses[0]) == list(range(1, 21))
