"""train.py export.from=..: settings, dialect folders with verify.json, W&B artifacts, and what reaches the hub."""

from __future__ import annotations

import io
import json
import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from rich.console import Console
from safetensors.torch import load_file

from drafters import exporting
from drafters.cli import spelled
from drafters.config import ExportConfig, LoggerConfig
from drafters.errors import ArtifactError, ConfigError
from drafters.exporting import run_export
from drafters.target import Target
from tests.drafters.forms_setup import KINDS, native, source_of
from tests.drafters.hub_endpoint import FakeHub
from tests.drafters.training_setup import run_settings
from tests.helpers import CONF, complaint, settings


@pytest.fixture(scope="module")
def fresh(tiny_target, tiny_config) -> Target:
    """A target that no engine has touched, in the same cache."""
    return Target.load(tiny_config)


@pytest.fixture(scope="module")
def natives(fresh, tmp_path_factory):
    """A folder per kind, each a run's with its export inside."""
    root = tmp_path_factory.mktemp("runs")
    kinds = {kind: KINDS[kind] for kind in ("eagle3", "eagle", "medusa2")}
    kinds["plain"] = replace(KINDS["eagle3"], fc_norm=False)
    return {kind: native(fresh, root / kind / "export", cfg) for kind, cfg in kinds.items()}


@pytest.fixture
def hub(monkeypatch):
    found = FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", found.address)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # a transport of its own, to servers of its own
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield found
    found.close()


FACTS = {
    "folder": "there",
    "round_trip": True,
    "errors": [],
    "probe": {"max_difference": 1e-6, "accepted": [1, 2, 3]},
    "engines": {
        "vllm": {"loads": True, "reasons": [], "command": "vllm serve target --speculative-config x"},
        "sglang": {"loads": False, "reasons": ["its architecture is not one of SGLang's"], "command": None},
    },
}


@pytest.fixture
def checked(monkeypatch):
    """The checks replaced: every folder is sound, and which were checked is kept."""
    seen = []

    def verify(folder, dialect, source):
        seen.append((dialect, folder))
        return FACTS

    monkeypatch.setattr(exporting, "verify", verify)
    return seen


@pytest.fixture
def run(fresh, natives, tmp_path, monkeypatch):
    """Run the command on one kind's export; returns what is printed. The target is the one at hand."""
    monkeypatch.setattr(exporting.Target, "load", lambda cfg: fresh)

    def start(kind: str, dialects: list[str], push: str | None = None, wandb: bool = False) -> str:
        cfg = run_settings(fresh)
        cfg.output_dir = str(tmp_path / "out")
        cfg.export = ExportConfig(source=str(natives[kind]), dialect=dialects, push=push)
        cfg.logger = LoggerConfig(wandb=wandb)
        console = Console(file=io.StringIO(), width=200)
        run_export(cfg, console)
        return console.file.getvalue()

    return start


# ---- settings


def test_from_is_typed_and_a_field_of_another_name_set(monkeypatch):
    assert spelled(["export.from=a/b", "export.fromage=1", "x=export.from=2"]) == [
        "export.source=a/b", "export.fromage=1", "x=export.from=2",
    ]  # fmt: skip
    monkeypatch.chdir(CONF.parent)
    run = settings("train", "export.from=conf", "export.dialect=[speculators,eagle3]")
    assert (run.export.source, run.export.dialect, run.export.push) == ("conf", ["speculators", "eagle3"], None)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("export.from=nowhere export.dialect=[eagle3]", "export.from=nowhere: there is no such folder"),
        ("export.from=conf", "export.from=conf says what to write, but export.dialect is empty.* eagle3, speculators"),
        ("export.from=conf export.dialect=[eagle4]", "must be one of eagle3, speculators, .*gguf"),
        ("export.from=conf export.dialect=[eagle3,eagle3]", "names one twice"),
        ("export.from=conf export.dialect=[eagle3] init_from=conf", "init_from=conf .*export.from=conf nothing is"),
        ("export.from=conf export.dialect=[eagle3] plan=true", "export.from=conf and plan=true are two different jobs"),
        ("export.dialect=[eagle3] doctor=conf", "export.dialect=.*doctor=conf are two different jobs"),
        ("export.dialect=[medusa-v1]", "medusa-v1 is for drafters of family medusa, .* eagle3. .*eagle3, speculators"),
        ("drafter=hydra export.dialect=[eagle3]", "of family hydra. Leave export.dialect out"),
        ("export.push=org/name", "export.push=org/name .*export.dialect is empty"),
        ("export.dialect=[eagle3] export.push=name", "export.push=name: must be ORG/NAME"),
        ("export.form=conf", "export has no key 'form'.*Allowed: from, dialect, push"),
    ],
)
def test_settings_at_odds_are_answered(overrides, message, monkeypatch):
    monkeypatch.chdir(CONF.parent)
    assert re.search(message, complaint("train", *overrides.split())), complaint("train", *overrides.split())


def test_a_folder_written_from_an_export_is_never_that_run_s(monkeypatch):
    monkeypatch.chdir(CONF.parent)
    for source, expected in (("conf", "outputs/export-conf"), ("tests/drafters", "outputs/export-drafters")):
        assert settings("train", f"export.from={source}", "export.dialect=[eagle3]").output_dir == expected
    assert settings("train", "export.dialect=[eagle3]").output_dir == "outputs/eagle3-smollm2-135m"


# ---- the run


def test_a_folder_for_each_dialect_and_verify_json_beside_them(run, checked, tmp_path):
    text = run("eagle3", ["speculators", "eagle3"])
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == ["eagle3", "speculators", "verify.json"]
    assert checked == [(name, out / name) for name in ("speculators", "eagle3")]
    assert json.loads((out / "verify.json").read_text()) == {"speculators": FACTS, "eagle3": FACTS}
    assert "speculators, vllm: vllm serve target --speculative-config x" in text
    assert "bit-equal" in text and "architecture is not one of" in text


def test_an_export_with_an_adapter_is_written_from_the_tuned_target(run, checked, natives, fresh, tmp_path):
    run("medusa2", ["medusa2-merged"])
    there = load_file(tmp_path / "out" / "medusa2-merged" / "model.safetensors")
    tuned = source_of(natives["medusa2"], fresh).target.own_model().state_dict()
    name = "model.layers.3.mlp.up_proj.weight"
    assert torch.equal(there[name], tuned[name]) and not torch.equal(there[name], fresh.model.state_dict()[name])


def test_nothing_is_written_when_one_dialect_cannot_hold_the_drafter(run, checked, natives, tmp_path):
    with pytest.raises(ConfigError, match="small is for drafters of family small"):
        run("eagle", ["eagle-vllm", "small"])
    with pytest.raises(ConfigError, match="gguf cannot hold this drafter.*fc_norm.*Set export.dialect to eagle3"):
        run("eagle3", ["eagle3", "gguf"])
    assert not (tmp_path / "out").exists() and checked == []


def test_a_folder_that_reads_back_otherwise_is_an_error_and_not_pushed(run, checked, monkeypatch, hub, tmp_path):
    wrong = FACTS | {"round_trip": False, "errors": ["there: tensor fc.weight is missing"]}
    monkeypatch.setattr(exporting, "verify", lambda *args: wrong)
    with pytest.raises(ArtifactError, match="export.dialect=eagle3: there does not .*: tensor fc.weight is missing"):
        run("eagle3", ["eagle3"], push="org/name")
    assert (tmp_path / "out" / "verify.json").is_file() and hub.files == {}


# ---- checking in a process of its own

CHECKER = """
import argparse, json, sys
parser = argparse.ArgumentParser()
parser.add_argument("folder")
for name in ("dialect", "target", "probe", "json"):
    parser.add_argument(f"--{name}", required=True)
given = vars(parser.parse_args())
if "WRONG" in given["dialect"]:
    sys.exit("it cannot be opened")
json.dump(given, open(given.pop("json"), "w"))
"""


def test_checking_is_another_process_with_these_arguments(monkeypatch, tmp_path):
    (tmp_path / "stub_checker.py").write_text(CHECKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(exporting, "CHECKER", "stub_checker")
    source = SimpleNamespace(target=SimpleNamespace(folder=tmp_path / "model"), folder=tmp_path / "export")
    found = exporting.verify(tmp_path / "there", "eagle3", source)
    assert found == {
        "folder": str(tmp_path / "there"),
        "dialect": "eagle3",
        "target": str(tmp_path / "model"),
        "probe": str(tmp_path / "export"),
    }
    with pytest.raises(ArtifactError, match="failed with status 1: it cannot be opened. Run it by hand: python -m "):
        exporting.verify(tmp_path / "there", "WRONG", source)


# ---- W&B and the hub


def fake_wandb(monkeypatch) -> list:
    """A wandb module that keeps the artifacts it is given."""
    given: list = []

    class Artifact:
        def __init__(self, name: str, type: str, metadata: dict) -> None:
            self.name, self.type, self.metadata, self.dirs = name, type, metadata, []

        def add_dir(self, folder: str, policy: str) -> None:
            self.dirs.append((folder, policy))

    run = SimpleNamespace(log_artifact=given.append, finish=lambda: given.append("finish"))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **kwargs: run, Artifact=Artifact))
    return given


def test_each_dialect_is_an_artifact_of_wandb(run, checked, monkeypatch, tmp_path):
    given = fake_wandb(monkeypatch)
    run("eagle", ["eagle-vllm", "eagle-sglang"], wandb=True)
    first, second, end = given
    assert (first.name, first.type, second.name, end) == ("out-eagle-vllm", "model", "out-eagle-sglang", "finish")
    assert first.dirs == [(str(tmp_path / "out" / "eagle-vllm"), "immutable")]
    assert first.metadata == {"dialect": "eagle-vllm", "family": "eagle", "target": "tiny-random", "verify": FACTS}


def test_wandb_that_fails_stops_nothing(run, checked, monkeypatch, caplog):
    wandb = types.SimpleNamespace(init=lambda **kwargs: SimpleNamespace(finish=lambda: None))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run("eagle", ["eagle-vllm"], wandb=True)
    assert "W&B does not take" in caplog.text and "AttributeError" in caplog.text


def test_one_dialect_goes_to_the_repository_itself_with_every_byte(run, checked, hub, tmp_path):
    text = run("eagle", ["eagle-vllm"], push="org/name")
    folder = tmp_path / "out" / "eagle-vllm"
    assert hub.files == {"org/name": {path.name: path.read_bytes() for path in folder.iterdir()}}
    assert f"pushed eagle-vllm to {hub.address}/org/name" in text


def test_a_target_of_this_machine_alone_is_told_before_others_read_of_it(run, checked, hub, fresh, caplog):
    run("eagle3", ["speculators"], push="org/name")
    assert f"names the target by its folder here, {fresh.folder}" in caplog.text


def test_several_dialects_go_to_a_repository_each(run, checked, hub):
    run("eagle", ["eagle-vllm", "eagle-sglang"], push="org/name")
    assert set(hub.files) == {"org/name-eagle-vllm", "org/name-eagle-sglang"}
    assert all("model.safetensors" in files for files in hub.files.values())


def test_a_hub_that_refuses_is_told_with_the_way_out(run, checked, hub, tmp_path):
    hub.refuse = 403
    with pytest.raises(ConfigError, match=r"export.push=org/name: http://.* did not take it \(.*no right.*HF_TOKEN"):
        run("eagle", ["eagle-vllm"], push="org/name")
    assert (tmp_path / "out" / "eagle-vllm").is_dir()


def test_a_hub_out_of_reach_is_told(run, checked, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="export.push=org/name: http://127.0.0.1:9 did not take it"):
        run("eagle", ["eagle-vllm"], push="org/name")


# ---- checked for real


def check_for_real(run, kind: str, dialects: list[str], folder: Path) -> None:
    run(kind, dialects)
    found = json.loads((folder / "out" / "verify.json").read_text())
    assert list(found) == dialects
    for facts in found.values():
        assert facts["round_trip"] and facts["errors"] == [] and facts["probe"]["max_difference"] < 1e-4
        assert all(set(verdict) == {"loads", "reasons", "command"} for verdict in facts["engines"].values())


def test_what_is_written_is_found_sound_by_another_process(run, tmp_path):
    check_for_real(run, "eagle3", ["speculators"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dialects"),
    [("plain", ["eagle3", "gguf"]), ("eagle", ["eagle-vllm", "eagle-sglang"]), ("medusa2", ["medusa2-merged"])],
)
def test_so_is_every_other_dialect(run, tmp_path, kind, dialects):
    check_for_real(run, kind, dialects, tmp_path)
