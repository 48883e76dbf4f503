"""train.py export.dialect=[...]: an export written for other engines, each dialect checked in a fresh process."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import drafters
from drafters.adapter import FOLDER, Adapter
from drafters.artifacts import atomic_write_json
from drafters.config import ExportConfig, TrainRun
from drafters.config_check import to_dict
from drafters.config_export import check_family
from drafters.contract import read_contract
from drafters.errors import ArtifactError
from drafters.export.forms import FORMS, write_form
from drafters.export.hub import push
from drafters.export.native import load_drafter
from drafters.export.source import Source
from drafters.logger import Logger
from drafters.target import Target

log = logging.getLogger(__name__)

EXPORT = "export"  # in a training run's folder
VERIFY_NAME = "verify.json"
CHECKER = "drafters.export.verify"


def run_export(run: TrainRun, console: Console) -> dict[str, Any]:
    """Leave one folder per dialect in output_dir and verify.json beside them, which is returned too.

    Raises ConfigError before anything is written when a dialect cannot hold the drafter, ArtifactError when one does
    not read back as it was written; nothing is pushed then.
    """
    out_dir, export = Path(run.output_dir), run.export
    folder = out_dir / EXPORT if export.source is None else Path(export.source).expanduser()
    source = open_source(folder, export.dialect, run)
    for name in export.dialect:
        FORMS[name].check(source)
    found = {name: verify(write_form(name, source, out_dir / name), name, source) for name in export.dialect}
    atomic_write_json(out_dir / VERIFY_NAME, found)
    show(found, out_dir / VERIFY_NAME, console)
    _require_sound(found)
    logger = Logger(out_dir, run.logger, to_dict(run))
    try:
        for name, facts in found.items():
            about = {"dialect": name, "family": source.contract.family, "target": source.contract.target}
            logger.artifact(out_dir / name, f"{out_dir.name}-{name}", about | {"verify": facts})
    finally:
        logger.close()
    _push(export, source, console, out_dir)
    return found


def open_source(folder: Path, dialects: list[str], run: TrainRun) -> Source:
    """Load an export and its target, tuned where the export brings an adapter; errors as load_drafter raises them."""
    check_family(dialects, read_contract(folder).family)
    target = Target.load(run.target)
    if (folder / FOLDER).is_dir():
        target = target.with_adapter(Adapter.read(folder / FOLDER))
    drafter, contract = load_drafter(folder, target)
    return Source(drafter, contract, target, folder)


def verify(folder: Path, dialect: str, source: Source) -> dict[str, Any]:
    """What a fresh process finds in a dialect's folder: see drafters.export.verify; ArtifactError when it fails.

    {folder, round_trip, errors, probe: {max_difference, accepted}, engines: {name: {loads, reasons, command}}}.
    """
    environment = dict(os.environ)
    # A process started by a script finds the package the script was given, installed or not.
    places = [str(Path(drafters.__file__).parent.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    with tempfile.TemporaryDirectory() as temp:
        result = Path(temp) / VERIFY_NAME
        command = [sys.executable, "-m", CHECKER, str(folder), "--dialect", dialect]
        command += ["--target", str(source.target.folder), "--probe", str(source.folder), "--json", str(result)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if not result.is_file():
            lines = (done.stderr or done.stdout).strip().splitlines() or ["nothing was said"]
            raise ArtifactError(
                f"{folder}: checking it failed with status {done.returncode}: {lines[-1]}. Run it by hand: "
                f"python -m {CHECKER} {folder} --dialect {dialect} --target {source.target.folder} --probe "
                f"{source.folder} --json {VERIFY_NAME}"
            )
        return json.loads(result.read_text(encoding="utf-8"))


def show(found: dict[str, Any], path: Path, console: Console) -> None:
    """Print which engines load which dialect, the command that serves it, and why the others do not."""
    table = Table("dialect", "read back", "probe", "loads in")
    for name, facts in found.items():
        loading = ", ".join(engine for engine, verdict in facts["engines"].items() if verdict["loads"])
        read = "bit-equal" if facts["round_trip"] else "DIFFERS"
        table.add_row(name, read, _probe(facts["probe"]), loading or "none")
    console.print(table)
    for name, facts in found.items():
        for engine, verdict in facts["engines"].items():
            why = "; ".join(verdict["reasons"])
            told = verdict["command"] if verdict["loads"] else f"does not load: {why}"
            # Whole lines, which are to be copied.
            console.print(f"{name}, {engine}: {told}", soft_wrap=True, markup=False, highlight=False)
            if verdict["loads"] and why:
                console.print(f"  {why}", soft_wrap=True, markup=False, highlight=False)
    console.print(f"written to {path}", soft_wrap=True, highlight=False)


def _probe(facts: dict[str, Any]) -> str:
    if facts["max_difference"] is None:
        return "not replayed"
    return f"differs by {facts['max_difference']:.2g}"


def _require_sound(found: dict[str, Any]) -> None:
    for name, facts in found.items():
        if not facts["round_trip"]:
            raise ArtifactError(
                f"export.dialect={name}: {facts['folder']} does not read back as it was written: {facts['errors'][0]}. "
                f"{VERIFY_NAME} says what else. Check the disk and run again."
            )


def _push(export: ExportConfig, source: Source, console: Console, out_dir: Path) -> None:
    if export.push is None:
        return
    local = sorted({"speculators", "medusa-v1", "medusa-v2"} & set(export.dialect))
    if local and source.target_path == str(source.target.folder):
        log.warning(
            "config.json of %s names the target by its folder here, %s, which says nothing to others: it has no hub id",
            *(" and ".join(local), source.target_path),
        )
    for name in export.dialect:
        repository = export.push if len(export.dialect) == 1 else f"{export.push}-{name}"
        address = push(out_dir / name, repository, f"{name} export by Outrider")
        console.print(f"pushed {name} to {address}", soft_wrap=True, highlight=False)
