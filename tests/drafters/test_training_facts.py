"""training.json: what a run took, counted by hand, kept over kills, read back or absent."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from drafters import tallies
from drafters.errors import ArtifactError
from drafters.export import native
from drafters.training_facts import TRAINING_NAME, TrainingFacts, read_training
from tests.drafters.export_setup import build_drafter, describe, reseal
from tests.drafters.training_setup import make_records, run_settings, run_training

FACTS = TrainingFacts(20, 10, 1234, 12, 300, 1.5, 2.25, 1, 2)


@pytest.fixture
def ticking(monkeypatch):
    """Every look at a clock takes a second of wall and two of CPU time: an optimiser step takes one and two."""
    now = {"wall": 0.0, "cpu": 0.0}

    def look(name, seconds):
        now[name] += seconds
        return now[name]

    clock = SimpleNamespace(perf_counter=lambda: look("wall", 1.0), process_time=lambda: look("cpu", 2.0))
    monkeypatch.setattr(tallies, "time", clock)


def test_tokens_are_counted_in_every_pass(tiny_target, tmp_path):
    records = make_records(4, prompt=6, response=20)
    _, result = run_training(tiny_target, records, run_settings(tiny_target, max_steps=4), tmp_path)
    # 4 records of 20 to 23 answer tokens lie in two rows of 64, a step is two rows: four passes.
    once = sum(len(record.response_ids) for record in records)
    facts = result.facts
    assert (facts.distinct_records, facts.distinct_tokens, facts.train_tokens) == (4, once, 4 * once)
    assert (facts.steps, facts.exported_step, facts.threads, facts.processes) == (4, 4, 1, 1)


def test_a_run_that_goes_on_from_another_counts_both():
    second = dataclasses.replace(FACTS, steps=7, train_tokens=66, cpu_minutes=None)
    both = second.after(FACTS)
    assert (both.steps, both.exported_step, both.distinct_tokens) == (7, 10, 300)
    assert (both.train_tokens, both.train_minutes, both.cpu_minutes) == (1300, 3.0, None)
    assert FACTS.after(FACTS).cpu_minutes == 4.5
    unknown = FACTS.after(None)
    assert (unknown.train_tokens, unknown.train_minutes, unknown.cpu_minutes) == (1234, None, None)


def test_answers_cut_at_the_row_and_records_held_out_do_not_count(tiny_target, tmp_path):
    records = make_records(40, prompt=6, response=80)
    _, result = run_training(tiny_target, records, run_settings(tiny_target, max_steps=1), tmp_path)
    assert result.facts.distinct_records == 38  # two are held out
    assert 38 * 56 <= result.facts.distinct_tokens <= 38 * 58  # rows of 64 tokens, prompts of 6 to 8


def test_a_kill_in_between_changes_no_fact(tiny_target, tmp_path, ticking):
    class Killed(BaseException):
        pass

    def kill(_):
        raise Killed

    records = make_records(12)
    settings = run_settings(tiny_target, max_steps=8, save_every=4)
    halves = dataclasses.replace(settings, trainer=dataclasses.replace(settings.trainer, eval_every=6))
    _, whole = run_training(tiny_target, records, settings, tmp_path / "whole")
    with pytest.raises(Killed):
        run_training(tiny_target, records, halves, tmp_path / "halves", kill)
    _, resumed = run_training(tiny_target, records, settings, tmp_path / "halves")
    assert resumed.facts == whole.facts
    assert (whole.facts.train_minutes, whole.facts.cpu_minutes) == (8 / 60, 16 / 60)
    # Started once more, the finished run says the same.
    assert run_training(tiny_target, records, settings, tmp_path / "halves")[1].facts == whole.facts


def test_the_step_of_the_exported_weights_is_the_best_ones(tiny_target, tmp_path):
    lengths = iter([2.0, 1.5])
    settings = run_settings(tiny_target, max_steps=4, eval_every=2)
    _, result = run_training(
        tiny_target, make_records(12), settings, tmp_path, lambda _: {"acceptance_length": next(lengths)}
    )
    assert (result.facts.steps, result.facts.exported_step) == (4, 2)


def test_a_checkpoint_that_kept_no_times_goes_on_without_them(tiny_target, tmp_path):
    records = make_records(12)
    settings = run_settings(tiny_target, max_steps=4)
    _, first = run_training(tiny_target, records, settings, tmp_path)
    last = tmp_path / "checkpoints" / "last"
    state = json.loads((last / "state.json").read_text())
    assert state.pop("seconds") > 0 and state.pop("cpu_seconds") > 0
    (last / "state.json").write_text(json.dumps(state))
    reseal(last)
    _, again = run_training(tiny_target, records, settings, tmp_path)
    assert again.facts == dataclasses.replace(first.facts, train_minutes=None, cpu_minutes=None)


def test_an_export_keeps_them_sealed(tiny_target, tmp_path):
    drafter = build_drafter(tiny_target)
    contract = describe(drafter, tiny_target)
    beside = {TRAINING_NAME: FACTS.to_json()}
    folder = native.export_drafter(
        drafter, tiny_target, contract, tmp_path / "export", command="python train.py", beside=beside
    )
    assert read_training(folder) == FACTS
    native.load_drafter(folder, tiny_target)
    (folder / TRAINING_NAME).write_text((folder / TRAINING_NAME).read_text().replace("1234", "9999"))
    with pytest.raises(ArtifactError, match=r"training\.json: sha256"):
        native.load_drafter(folder, tiny_target)


def test_an_export_older_than_the_file_has_none(tmp_path):
    assert read_training(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is not JSON"), ("[]", "has list, expected the fields"), ('{"steps": 1}', r"has \['steps'\], expected")],
)
def test_malformed_facts_are_named(tmp_path, text, words):
    (tmp_path / TRAINING_NAME).write_text(text)
    with pytest.raises(ArtifactError, match=rf"training\.json {words}"):
        read_training(tmp_path)
