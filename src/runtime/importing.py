"""mode=import: a drafter made elsewhere becomes an export, with contract and probe."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from drafters.config import ServeRun
from drafters.drafter_path import parse_drafter_path
from drafters.export.dialect import EXPORT_DTYPE
from drafters.export.native import export_drafter
from drafters.models import Drafter
from drafters.public.conventions import measure, samples
from drafters.public.load import Resolved, assemble, require_public, resolve_public
from drafters.target import Target
from runtime.loading import folder_of

log = logging.getLogger(__name__)

IMPORT_NAME = "import.json"  # in the export: where it is from, how it was read and what was measured


def import_drafter(run: ServeRun, console: Console, command: str) -> Path:
    """serve.py mode=import: leave output_dir/export and return its path.

    Raises ConfigError where drafter.path is an export already or an export has no place for it, and what load_public
    raises.
    """
    folder = folder_of(parse_drafter_path(run.drafter.path)[0])
    require_public(folder)
    target = Target.load(run.target)
    found = resolve_public(folder, target)
    told = found.to_json() | _rounded(found, target)
    export = export_drafter(
        _whole(found), target, found.contract, Path(run.output_dir) / "export", command=command,
        beside={IMPORT_NAME: told},
    )  # fmt: skip
    console.print(_table(found))
    console.print(f"exported to {export}", soft_wrap=True, highlight=False)
    return export


def _whole(found: Resolved) -> Drafter:
    """The drafter with the folder's own numbers: what it runs in may hold fewer digits than an export does."""
    drafter = found.drafter.float()
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name in found.reading.tensors:
                parameter.copy_(found.reading.tensors[name])
    return drafter


def _rounded(found: Resolved, target: Target) -> dict[str, Any]:
    """What an export's dtype does to the numbers; empty where it changes none of them."""
    tensors = {name: value for name, value in found.reading.tensors.items() if value.is_floating_point()}
    halved = {name: value.to(EXPORT_DTYPE).to(value.dtype) for name, value in tensors.items()}
    changed = sorted(name for name in tensors if not torch.equal(tensors[name], halved[name]))
    if not changed:
        return {}
    reading = replace(found.reading, tensors=found.reading.tensors | halved)
    after = measure(assemble(found.public, reading, target), reading.taps, samples(target, reading.taps))
    before = found.measured[found.reading.title]
    kind = str(EXPORT_DTYPE).removeprefix("torch.")
    log.warning(
        "%d tensors (%s, ..) hold more digits than %s, in which exports are kept, and are rounded: %d of %d first "
        "drafts are accepted after it, %d before",
        *(len(changed), changed[0], kind, after.accepted, after.positions, before.accepted),
    )
    return {"rounded": {"tensors": len(changed), "dtype": kind, "accepted": after.accepted}}


def _table(found: Resolved) -> Table:
    title = f"{found.public.folder.name} ({found.public.dialect})"
    table = Table("read as", "taps", "first drafts accepted", "at temperature 1", "", title=title)
    for reading in (*found.public.readings, *found.doubted):
        measured = found.measured[reading.title]
        note = "taken" if reading is found.reading else "only measured" if reading in found.doubted else ""
        share = f"{measured.rate:.3f} ({measured.accepted} of {measured.positions})"
        table.add_row(reading.title, str(list(reading.taps)), share, f"{measured.overlap.mean():.3f}", note)
    return table
