"""Which drafter serve.py runs when drafter.path is not set: the newest export, named aloud."""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path

from drafters.artifacts import MANIFEST_NAME, read_manifest
from drafters.contract import read_contract
from drafters.drafter_path import CHOICES
from drafters.errors import ArtifactError, ContractError
from drafters.export.native import KIND
from drafters.target import Target

log = logging.getLogger(__name__)
ROOTS = (Path("outputs"), Path("artifacts"))


def choose_drafter(path: str | None, target: Target, roots: tuple[Path, ...] = ROOTS) -> str:
    """drafter.path as it is, or the folder of the newest export under the first of `roots` that holds one.

    Raises ArtifactError when there is none, ContractError when the newest was made for another target.
    """
    if path is not None:
        return path
    found = exports(roots)
    if not found:
        raise ArtifactError(
            f"drafter.path is not set and there is no export under {' or '.join(map(str, roots))}. "
            f"Train one with train.py, or set drafter.path to {CHOICES}."
        )
    newest = found[0]
    try:
        read_contract(newest).check_target(target, str(newest))
    except ContractError as error:
        raise ContractError(
            f"drafter.path is not set, and the newest export does not fit target {target.name!r}: {error} "
            f"{_other(found[1:], target)}"
        ) from error
    written = datetime.fromtimestamp(_written(newest)).isoformat(" ", "seconds")
    log.info("drafter.path is not set: taking the newest export, %s (written %s)", newest, written)
    return str(newest)


def exports(roots: tuple[Path, ...] = ROOTS) -> list[Path]:
    """Export folders, all of the first root before those of the next, the newest of each first."""
    return [folder for root in roots for folder in sorted(_under(root), key=lambda f: (-_written(f), str(f)))]


def _under(root: Path) -> list[Path]:
    found = []
    for manifest in root.rglob(MANIFEST_NAME):
        folder = manifest.parent
        # Names with a leading dot are folders still being written, or the one a swap is about to drop.
        if any(part.startswith(".") for part in folder.relative_to(root).parts):
            continue
        try:
            if read_manifest(folder).kind == KIND:
                found.append(folder)
        except ArtifactError as error:
            log.warning("passing over %s: %s", folder, error)
    return found


def _written(folder: Path) -> float:
    return (folder / MANIFEST_NAME).stat().st_mtime


def _other(folders: list[Path], target: Target) -> str:
    for folder in folders:
        try:
            read_contract(folder).check_target(target, str(folder))
        except ContractError:
            continue
        return f"The newest that fits is {folder}: set drafter.path={folder}."
    return "Set drafter.path to an export made for it, or train one with train.py."
