"""From a public folder to a drafter that runs: read, measure its readings, take the best, and derive a contract."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafters.artifacts import MANIFEST_NAME, read_manifest
from drafters.contract import CONTRACT_NAME, Contract
from drafters.errors import ConfigError
from drafters.export.native import KIND, describe_drafter, fill
from drafters.models import FAMILIES, Drafter
from drafters.public.conventions import Measured, Sample, measure, samples
from drafters.public.eagle import read_eagle
from drafters.public.eagle3 import read_eagle3
from drafters.public.folder import PublicFolder, open_folder
from drafters.public.gguf import open_gguf
from drafters.public.medusa import read_medusa
from drafters.public.mtp import read_mtp
from drafters.public.reading import PublicDrafter, Reading
from drafters.public.recognise import recognise
from drafters.public.small import read_small
from drafters.target import Target

log = logging.getLogger(__name__)

READERS: dict[str, Callable[[PublicFolder, Target], PublicDrafter]] = {
    "eagle3": read_eagle3,
    "eagle": read_eagle,
    "medusa": read_medusa,
    "mtp": read_mtp,
    "small": read_small,
}


@dataclass(frozen=True)
class Resolved:
    """A public drafter as it was taken. doubted: what was measured beside its readings; measured: by title."""

    public: PublicDrafter
    reading: Reading
    doubted: tuple[Reading, ...]
    drafter: Drafter
    contract: Contract
    measured: dict[str, Measured]

    def to_json(self) -> dict[str, Any]:
        """What was measured and chosen, as JSON values."""
        told = [*self.public.readings, *self.doubted]
        return {
            "source": self.public.folder.name,
            "format": self.public.dialect,
            "taken": self.reading.title,
            "measured": [
                {
                    "reading": reading.title,
                    "taps": list(reading.taps),
                    "accepted": self.measured[reading.title].accepted,
                    "positions": self.measured[reading.title].positions,
                    "overlap": float(self.measured[reading.title].overlap.mean()),
                    "by_chance": self.measured[reading.title].by_chance,
                }
                for reading in told
            ],
        }


def is_public(folder: Path) -> bool:
    """Whether a folder is no export of ours, whole or damaged, and so has to be read as others write them."""
    folder = Path(folder)
    if (folder / MANIFEST_NAME).is_file():
        return read_manifest(folder).kind != KIND
    return not (folder / CONTRACT_NAME).is_file()


def is_small(folder: Path) -> bool:
    """Whether a public folder is a language model of its own, of whatever architecture."""
    return recognise(_opened(folder)) == "small"


def read_public(folder: Path, target: Target) -> PublicDrafter:
    """A public drafter's readings for `target`; ConfigError, ArtifactError, ContractError say what is wrong."""
    opened = _opened(folder)
    return READERS[recognise(opened)](opened, target)


def _opened(folder: Path) -> PublicFolder:
    found = None if (Path(folder) / "config.json").is_file() else open_gguf(Path(folder))
    return open_folder(folder) if found is None else found


def load_public(folder: Path, target: Target) -> tuple[Drafter, Contract]:
    """A public drafter bound to `target`, in its dtype and on its device, and the contract derived for it."""
    found = resolve_public(folder, target)
    return found.drafter, found.contract


def resolve_public(folder: Path, target: Target) -> Resolved:
    """Measure every reading of a public folder, take the best, say which and how sure that is.

    Raises what read_public does, and ArtifactError naming a tensor that is missing, unknown or of another shape.
    """
    public = read_public(folder, target)
    texts = samples(target, tuple(sorted({tap for reading in public.readings for tap in reading.taps})))
    measured = {reading.title: _measured(public, reading, texts, target) for reading in public.readings}
    best = public.readings[0]
    for reading in public.readings[1:]:
        if measured[reading.title].beats(measured[best.title]):
            best = reading
    # Of a drafter that fits nowhere nothing says which of its readings the doubts are about.
    bases = public.readings if measured[best.title].by_chance else (best,)
    doubted = tuple(doubt.of(reading) for doubt in public.doubts for reading in bases)
    measured |= {reading.title: _measured(public, reading, texts, target) for reading in doubted}
    _tell(public, best, doubted, measured)
    drafter = assemble(public, best, target)
    length = min(getattr(best.shape, "max_position_embeddings", target.max_length), target.max_length)
    contract = describe_drafter(drafter, target, taps=best.taps, steps=public.steps, max_length=length)
    return Resolved(public, best, doubted, drafter, contract, measured)


def _measured(public: PublicDrafter, reading: Reading, texts: list[Sample], target: Target) -> Measured:
    # Built for this alone: several drafters of a large target need not be in memory at once.
    return measure(assemble(public, reading, target), reading.taps, texts)


def assemble(public: PublicDrafter, reading: Reading, target: Target) -> Drafter:
    """The drafter of a reading, bound; ArtifactError names, as the file does, a tensor that the graph has otherwise."""
    family = FAMILIES[public.family]
    with torch.device("meta"):
        expected = family(reading.shape).exported_state()
    for own in sorted(set(expected) | set(reading.tensors)):
        name = public.names.get(own, own)
        problem = None
        if own not in reading.tensors:
            problem = f"tensor {name} is missing"
        elif own not in expected:
            problem = f"tensor {name} is not part of the graph that config.json describes"
        elif reading.tensors[own].shape != expected[own].shape:
            sizes = list(reading.tensors[own].shape), list(expected[own].shape)
            problem = f"tensor {name} has shape {sizes[0]}, config.json describes {sizes[1]}"
        elif reading.tensors[own].is_floating_point() != expected[own].is_floating_point():
            problem = f"tensor {name} is {reading.tensors[own].dtype}"
        if problem is not None:
            way_out = "Fetch the folder again, or set target.path to the model that this drafter was made for."
            raise PublicFolder(public.folder, {}, {}).wrong(problem, way_out)
    return fill(family(reading.shape), reading.tensors, target)


def _tell(public: PublicDrafter, best: Reading, doubted: tuple[Reading, ...], measured: dict[str, Measured]) -> None:
    """Log what each reading was measured at and which was taken; warn where none fits, or a doubt fits better."""

    def shown(reading: Reading) -> str:
        found = measured[reading.title]
        share = f"{found.rate:.3f} ({found.accepted} of {found.positions}; at temperature 1 {found.overlap.mean():.3f})"
        return f"{share} with {reading.title}, taps {list(reading.taps)}"

    where, first = public.folder, public.readings[0]
    log.info("drafter %s: no contract, read as %s. Acceptance of first drafts on a short text:", where, public.dialect)
    for reading in public.readings:
        log.info("  %s%s", shown(reading), " <- taken" if reading is best else "")
    if best is not first:
        log.warning("drafter %s: its format says %s, but %s fits better and is taken", where, first.title, best.title)
    if measured[best.title].by_chance:
        log.warning(
            "drafter %s DOES NOT FIT: %.3f of its first drafts are accepted (%d of %d), which is chance, however it is "
            "read. It will draft in vain. Check that it was made for this target, and its weights.",
            *(where, measured[best.title].rate, measured[best.title].accepted, measured[best.title].positions),
        )
    better = [reading for reading in doubted if measured[reading.title].beats(measured[best.title])]
    for reading in sorted(better, key=lambda reading: -measured[reading.title].accepted)[:1]:
        log.warning("drafter %s is damaged or says it wrong: acceptance would be %s", where, shown(reading))


def require_public(folder: Path) -> None:
    """ConfigError where a folder is an export of ours already."""
    if not is_public(folder):
        raise ConfigError(
            f"drafter.path={folder} has a {CONTRACT_NAME} and a probe already: there is nothing to import. Give it to "
            "mode=eval, or to train.py export.from."
        )
