"""Which answers a training run takes, and what it leaves when it is started again."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from runtime import pipeline
from runtime.packing import PackedLinear
from tests.helpers import settings


@pytest.fixture
def taken(monkeypatch):
    """Where find_responses went: the folder it read, or "collected"."""
    found = []
    monkeypatch.setattr(pipeline.Target, "load", lambda cfg: None)
    monkeypatch.setattr(pipeline, "read_responses", lambda path: found.append(str(path)) or SimpleNamespace())
    monkeypatch.setattr(pipeline, "join", lambda sets: sets[0])
    monkeypatch.setattr(pipeline, "check_responses", lambda found, target: (4, 4))
    monkeypatch.setattr(pipeline, "collect_responses", lambda *args: found.append("collected"))
    return found


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ((), "artifacts/smollm2-135m-responses-short artifacts/smollm2-135m-responses"),
        (("data.temperature=0.7",), "collected"),
        (("data.num_prompts=5",), "collected"),
        (("data=magpie",), "collected"),
        (("target=llama3-8b",), "collected"),
        (("data.responses=tests",), "tests"),
        (("target.kept_responses=null",), "collected"),
    ],
)
def test_kept_answers_serve_only_where_no_data_setting_asks_for_others(taken, tmp_path, overrides, expected):
    run = settings("train", *overrides, f"output_dir={tmp_path}")
    pipeline.find_responses(run, Console(file=io.StringIO()))
    assert taken == expected.split()


def test_another_models_folder_does_not_take_the_kept_answers(taken, tmp_path):
    run = settings("train", f"target.path={tmp_path}", f"output_dir={tmp_path}/out")
    pipeline.find_responses(run, Console(file=io.StringIO()))
    assert taken == ["collected"]


class Model(torch.nn.Module):
    """As much of a transformers model as is lent."""

    config = SimpleNamespace(_attn_implementation="sdpa")

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4, bias=False)

    def set_attn_implementation(self, name):
        assert name == "sdpa"


def test_max_records_trains_on_the_first_and_counts_them_but_all_give_the_vocabulary(monkeypatch, tmp_path):
    records = [SimpleNamespace(id=str(i), response_ids=[1] * i) for i in range(1, 6)]
    seen = {}
    target = SimpleNamespace(num_layers=30, model=Model())
    monkeypatch.setattr(pipeline.Target, "load", lambda cfg: target)
    monkeypatch.setattr(pipeline, "held_out_prompts", lambda run: [])
    meta = {"settings": {"data.source": "builtin"}}
    monkeypatch.setattr(pipeline, "find_responses", lambda *args: SimpleNamespace(records=records, meta=meta))
    drafter = SimpleNamespace(tuned=lambda target: target, measure=lambda batches: seen.update(measured=True))
    monkeypatch.setattr(
        pipeline, "make_drafter", lambda run, target, given: seen.update(vocabulary=len(given)) or drafter
    )
    result = SimpleNamespace(stopped=False, facts=None)

    def train(drafter, target, given, *rest):
        rest[-1](target.model)
        seen.update(train=len(given), layers=type(target.model.layer))
        return result

    monkeypatch.setattr(pipeline, "train", train)
    monkeypatch.setattr(pipeline.checkpoint, "find", lambda folder: None)
    monkeypatch.setattr(
        pipeline, "export_and_measure", lambda run, drafter, target, data, *rest: seen.update(data=data)
    )
    overrides = ("trainer.max_records=3", "logger.wandb=false", f"output_dir={tmp_path}")
    pipeline.run_train(settings("train", *overrides), Console(file=io.StringIO()))
    assert (seen["vocabulary"], seen["train"], seen["measured"]) == (5, 3, True)
    assert (seen["data"].records, seen["data"].tokens) == (3, 1 + 2 + 3)
    # The target is laid out for its forwards, and whole again for what is exported.
    assert seen["layers"] is PackedLinear and type(target.model.layer) is torch.nn.Linear


def test_every_mode_of_serve_has_its_job(monkeypatch):
    seen = []
    monkeypatch.setattr(pipeline, "set_threads", lambda requested: 1)
    for name in ("evaluate", "compare", "generate_once", "chat"):
        monkeypatch.setattr(pipeline, name, lambda run, console, name=name: seen.append(name))
    modes = (("mode=eval",), ("mode=compare", "drafters=[ngram]"), ("mode=generate", "prompt=x"), ("mode=chat",))
    for overrides in modes:
        pipeline.run_serve(settings("serve", *overrides), Console(file=io.StringIO()))
    assert seen == ["evaluate", "compare", "generate_once", "chat"]


def test_what_is_exported_is_handed_to_wandb(monkeypatch, tmp_path):
    contract = SimpleNamespace(family="eagle3", target="tiny")
    monkeypatch.setattr(pipeline, "taps_of", lambda run, target: (2, 4, 5))
    monkeypatch.setattr(pipeline, "describe_drafter", lambda *args, **kwargs: contract)
    monkeypatch.setattr(pipeline, "export_drafter", lambda drafter, target, contract, dest, **kwargs: dest)
    monkeypatch.setattr(pipeline, "measure", lambda *args: {"acceptance_length": 2.5})
    monkeypatch.setattr(pipeline, "add_report", lambda *args: None)
    monkeypatch.setattr(pipeline.reports, "write", lambda *args: None)
    monkeypatch.setattr(pipeline.reports, "check_lossless", lambda report: None)
    given = []
    logger = SimpleNamespace(artifact=lambda *args: given.append(args))
    run = settings("train", f"output_dir={tmp_path}/run")
    facts, console = SimpleNamespace(to_json=lambda: {}), Console(file=io.StringIO())
    pipeline.export_and_measure(run, None, None, None, [], facts, console, logger)
    about = {"family": "eagle3", "target": "tiny", "acceptance_length": 2.5}
    assert given == [(tmp_path / "run" / "export", "run-export", about)]
