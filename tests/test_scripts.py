"""train.py, distill.py, serve.py from the command line: help, sweeps, experiments, exit codes, one-line errors."""

from __future__ import annotations

import logging
import os
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from drafters.config import FAMILIES, GROUPS, RUNS
from drafters.config_allowed import leaves
from drafters.config_export import FIELD, SOURCE
from drafters.errors import ConfigError, TargetError
from tests.helpers import CONF, ROOT

SCRIPTS = ("train", "distill", "serve")


@pytest.fixture
def outcome(monkeypatch, tmp_path, capsys):
    """Run a script in this process, in tmp_path, with the pipeline replaced by a recorder."""
    seen: list = []
    stub = types.ModuleType("runtime.pipeline")
    plan, doctor = types.ModuleType("drafters.plan"), types.ModuleType("runtime.diagnosis")
    exporting = types.ModuleType("drafters.exporting")
    jobs = ((stub, "run_train"), (stub, "run_distill"), (stub, "run_serve"), (plan, "run_plan"), (doctor, "run_doctor"),
            (exporting, "run_export"))  # fmt: skip
    for module, name in jobs:
        setattr(module, name, lambda run, console, name=name: seen.append((name, run)))
    monkeypatch.setitem(sys.modules, "runtime.pipeline", stub)
    monkeypatch.setitem(sys.modules, "drafters.plan", plan)
    monkeypatch.setitem(sys.modules, "runtime.diagnosis", doctor)
    monkeypatch.setitem(sys.modules, "drafters.exporting", exporting)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    before = root.handlers[:], root.level

    def run(script: str, *arguments: str) -> tuple[int, list, str, str]:
        seen.clear()
        monkeypatch.setattr(sys, "argv", [str(ROOT / f"{script}.py"), *arguments])
        status = 0
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as left:
            status = left.code or 0
        text = capsys.readouterr()
        return status, list(seen), text.out, text.err

    yield types.SimpleNamespace(run=run, pipeline=stub, monkeypatch=monkeypatch, folder=tmp_path)
    root.handlers[:], root.level = before
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_plain_run_reaches_the_pipeline_with_typed_settings(outcome, script):
    status, seen, out, err = outcome.run(script, "target=tiny-random", "experiment=tiny")
    assert status == 0
    [(name, run)] = seen
    assert name == f"run_{script}" and type(run) is RUNS[script]
    assert run.target.name == "tiny-random"
    saved = yaml.safe_load((outcome.folder / run.output_dir / "config.yaml").read_text())
    assert saved["target"]["random"]["vocab_size"] == 512
    assert "vocab_size: 512" in err and out == ""
    assert (outcome.folder / run.output_dir / f"{script}.log").exists()
    assert (outcome.folder / run.output_dir / ".hydra" / "overrides.yaml").exists()


def test_experiment_sets_what_each_script_has(outcome):
    _, [(_, train)], _, _ = outcome.run("train", "experiment=tiny")
    assert (train.trainer.max_steps, train.runtime.depth, train.data.max_new_tokens) == (4, 2, 16)
    _, [(_, distill)], _, _ = outcome.run("distill", "experiment=tiny")
    assert distill.data == train.data
    _, [(_, serve)], _, _ = outcome.run("serve", "experiment=tiny", "eval.num_prompts=1")
    assert serve.runtime == train.runtime
    assert (serve.eval.num_prompts, serve.eval.max_new_tokens) == (1, 8)


def test_plan_goes_to_the_plan_alone(outcome):
    status, seen, _, _ = outcome.run("train", "plan=true", "target=llama3-70b")
    assert status == 0
    assert [name for name, _ in seen] == ["run_plan"]


def test_doctor_goes_to_the_doctor_alone_and_leaves_the_runs_settings(outcome):
    folder = "outputs/eagle3-tiny-random"
    assert outcome.run("train", "experiment=tiny")[0] == 0
    kept = (outcome.folder / folder / "config.yaml").read_text()
    for where in ((), (f"output_dir={folder}",)):
        status, [(name, run)], _, err = outcome.run("train", "experiment=tiny", f"doctor={folder}", *where)
        assert (status, name, run.doctor) == (0, "run_doctor", folder) and f"doctor: {folder}" in err
        assert (outcome.folder / folder / "config.yaml").read_text() == kept
    # What Hydra leaves of a doctor goes elsewhere unless output_dir says so.
    assert (outcome.folder / "outputs/doctor-eagle3-tiny-random/train.log").exists()


def test_export_from_trains_nothing_and_leaves_the_runs_settings(outcome):
    folder = "outputs/eagle3-tiny-random"
    assert outcome.run("train", "experiment=tiny")[0] == 0
    (outcome.folder / folder / "export").mkdir()
    kept = (outcome.folder / folder / "config.yaml").read_text()
    asked = ("experiment=tiny", f"export.from={folder}/export", "export.dialect=[eagle3]")
    for where in ((), (f"output_dir={folder}",)):
        status, [(name, run)], _, _ = outcome.run("train", *asked, *where)
        assert (status, name, run.export.source) == (0, "run_export", f"{folder}/export")
        assert (outcome.folder / folder / "config.yaml").read_text() == kept
    assert (outcome.folder / "outputs/export-eagle3-tiny-random/train.log").exists()
    status, seen, _, err = outcome.run("train", "export.from=nowhere", "export.dialect=[eagle3]")
    assert (status, seen) == (2, []) and err.startswith("error: export.from=nowhere: there is no such folder")
    assert "export.source" not in outcome.run("train", "export.from=[1]", "export.dialect=[eagle3]")[3]


def test_dialects_are_written_once_a_drafter_is_trained(outcome):
    asked = ("train", "experiment=tiny", "export.dialect=[speculators]")
    assert [name for name, _ in outcome.run(*asked)[1]] == ["run_train"]  # no report: another process has it
    outcome.monkeypatch.setattr(outcome.pipeline, "run_train", lambda run, console: {"acceptance_length": 2.0})
    [(name, run)] = outcome.run(*asked)[1]
    assert (name, run.export.dialect, run.export.source) == ("run_export", ["speculators"], None)


@pytest.mark.parametrize(
    ("script", "sweep", "values"),
    [
        ("train", "trainer.seed=1,2", [1, 2]),
        ("distill", "data.seed=1,2", [1, 2]),
        ("serve", "sampling.seed=1,2", [1, 2]),
    ],
)
def test_sweeps_run_every_job_in_its_own_folder(outcome, script, sweep, values):
    status, seen, _, _ = outcome.run(script, "-m", sweep, "experiment=tiny", "output_dir=out/x")
    assert status == 0
    group, key = sweep.partition("=")[0].split(".")
    assert [getattr(getattr(run, group), key) for _, run in seen] == values
    folders = [Path(run.output_dir) for _, run in seen]
    assert len(set(folders)) == 2
    for folder in folders:
        assert folder.parent == outcome.folder / "out" and re.fullmatch(r"x-[0-9a-f]{8}", folder.name)
        assert (folder / "config.yaml").exists()
    # The same job lands in the same folder again, whatever the order of the sweep: that is what resume needs.
    _, again, _, _ = outcome.run(script, "-m", sweep.replace("1,2", "2,1"), "experiment=tiny", "output_dir=out/x")
    assert [Path(run.output_dir) for _, run in again] == folders[::-1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_cfg_job_shows_the_settings_and_runs_nothing(outcome, script):
    status, seen, out, _ = outcome.run(script, "--cfg", "job", "experiment=tiny")
    assert (status, seen) == (0, [])
    shown = yaml.safe_load(out)
    assert shown["target"]["name"] == "tiny-random"
    assert list(outcome.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "status"), [(TargetError("target.path x is gone. Set y."), 1), (ConfigError("a=b: must be c."), 2)]
)
def test_errors_inside_a_run_are_one_line(outcome, error, status):
    def fail(run, console):
        raise error

    outcome.monkeypatch.setattr(outcome.pipeline, "run_distill", fail)
    # RANK=1 keeps the settings off stderr, so that what is left is the error alone.
    outcome.monkeypatch.setenv("RANK", "1")
    found, _, out, err = outcome.run("distill")
    assert (found, out, err) == (status, "", f"error: {error}\n")


def test_full_error_shows_the_traceback(outcome):
    def fail(run, console):
        raise TargetError("gone")

    outcome.monkeypatch.setattr(outcome.pipeline, "run_train", fail)
    outcome.monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(TargetError, match="gone"):
        outcome.run("train")
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def test_a_fault_of_ours_is_never_dressed_up_as_the_users(outcome):
    def fail(run, console):
        raise RuntimeError("a bug")

    outcome.monkeypatch.setattr(outcome.pipeline, "run_train", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        outcome.run("train")


def test_control_c_leaves_with_130(outcome):
    def stop(run, console):
        raise KeyboardInterrupt

    outcome.monkeypatch.setattr(outcome.pipeline, "run_serve", stop)
    assert outcome.run("serve")[0] == 130


def test_other_ranks_neither_print_nor_save_settings(outcome):
    outcome.monkeypatch.setenv("RANK", "1")
    status, seen, out, err = outcome.run("train", "experiment=tiny")
    assert (status, len(seen), out, err) == (0, 1, "", "")
    assert not (outcome.folder / "outputs/eagle3-tiny-random/config.yaml").exists()


def test_a_wrong_setting_in_a_sweep_is_one_line_too(outcome):
    outcome.monkeypatch.setenv("RANK", "1")
    status, seen, _, err = outcome.run("train", "-m", "trainer.seed=1", "deepspeed.zero_stage=7")
    assert (status, seen) == (2, [])
    assert err.splitlines()[-1] == "error: deepspeed.zero_stage=7: must be a whole number >= 0 and <= 3."


# ---- real processes


def _python(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    env.pop("HYDRA_FULL_ERROR", None)
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_teaches(tmp_path, script):
    done = _python(str(ROOT / f"{script}.py"), "--help", folder=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith(f"python {script}.py [KEY=VALUE ...]\n")
    for word in ("Examples", "Settings used most", "Groups: GROUP=OPTION", "--cfg job", "HYDRA_FULL_ERROR=1"):
        assert word in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_key_is_answered_before_anything_heavy_is_imported(tmp_path):
    code = (
        "import runpy, sys\n"
        f"sys.argv = [{str(ROOT / 'train.py')!r}, 'trainer.lerning_rate=1']\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as left:\n"
        "    heavy = {'torch', 'transformers', 'deepspeed', 'datasets', 'wandb'} & set(sys.modules)\n"
        "    print(left.code, sorted(heavy))\n"
    )
    done = _python("-c", code, folder=tmp_path)
    assert done.stdout == "2 []\n"
    assert done.stderr.startswith("error: trainer.lerning_rate=1: trainer has no key 'lerning_rate'. Did you mean")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_wrong_settings_leave_with_2_and_one_line(tmp_path):
    done = _python(str(ROOT / "serve.py"), "drafter.path=nowhere", folder=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines() == [
        f"error: drafter.path=nowhere: 'nowhere' is not a drafter: there is no such folder (looked in {tmp_path}). "
        "Set drafter.path to an export folder, none, ngram, suffix, recycle, random, small:FOLDER, or several of them "
        "joined by +; a drafter made elsewhere goes by its folder or its hub id."
    ]


# ---- the help texts and the scripts themselves


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_exactly_the_groups_and_options_there_are(script):
    text = yaml.safe_load((CONF / "hydra" / "help" / f"{script}.yaml").read_text())["template"]
    block = text.partition("Groups: GROUP=OPTION\n")[2].partition("\n\n")[0]
    listed = {line.split()[0]: line.split()[1:] for line in block.splitlines()}
    assert listed == {group: sorted(file.stem for file in (CONF / group).glob("*.yaml")) for group in GROUPS[script]}


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_only_settings_that_exist(script):
    text = yaml.safe_load((CONF / "hydra" / "help" / f"{script}.yaml").read_text())["template"]
    fields = {path for run in RUNS.values() for path, _, _ in leaves(run)}
    known = {SOURCE if path == FIELD else path for path in fields} | set(GROUPS["train"])
    named = set(re.findall(r"(?<![\w./-])([a-z_]+(?:\.[a-z_]+)*)=", text))
    assert named and named <= known, named - known


def test_every_family_has_an_option_of_its_name():
    for group, families in FAMILIES.items():
        assert set(families) == {file.stem for file in (CONF / group).glob("*.yaml")}


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_thin(script):
    assert len((ROOT / f"{script}.py").read_text().splitlines()) <= 60
