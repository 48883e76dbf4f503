"""Settings of the exports that train.py writes for other engines, and their checks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drafters.config_base import Section, option
from drafters.errors import ConfigError

if TYPE_CHECKING:
    from drafters.config import TrainRun

# What one can ask for, and the families whose drafters can be said in it.
DIALECTS: dict[str, tuple[str, ...]] = {
    "eagle3": ("eagle3",),
    "speculators": ("eagle3",),
    "eagle-vllm": ("eagle",),
    "eagle-sglang": ("eagle",),
    "medusa-v1": ("medusa",),
    "medusa-v2": ("medusa",),
    "medusa-vllm": ("medusa",),
    "medusa2-merged": ("medusa2",),
    "mtp-deepseek": ("mtp",),
    "mtp-qwen3next": ("mtp",),
    "small": ("small",),
    "gguf": ("eagle3",),
}
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SOURCE, FIELD = "export.from", "export.source"  # as it is typed, and the field


@dataclass
class ExportConfig(Section):
    """What an export is written as for other engines."""

    typed = {"source": "from"}  # a keyword cannot name a field

    source: str | None = None  # export.from on the command line: an export folder; nothing is trained
    dialect: list[str] = option([], choices=tuple(DIALECTS))  # one folder each, in output_dir
    push: str | None = None  # ORG/NAME on the hub; of several dialects each goes to ORG/NAME-DIALECT


def dialects_of(family: str) -> list[str]:
    """The dialects that drafters of a family can be written in."""
    return [name for name, families in DIALECTS.items() if family in families]


def check_family(dialects: list[str], family: str) -> None:
    """Raise ConfigError for a dialect that is not for drafters of this family."""
    for name in dialects:
        if family not in DIALECTS[name]:
            others = dialects_of(family)
            way_out = f"Set export.dialect to some of {', '.join(others)}" if others else "Leave export.dialect out"
            raise ConfigError(
                f"export.dialect={name} is for drafters of family {', '.join(DIALECTS[name])}, this one is of family "
                f"{family}. {way_out}."
            )


def check_export(run: TrainRun) -> None:
    """Raise ConfigError where the settings of an export are at odds with each other or with another job."""
    export, dialects = run.export, run.export.dialect
    asked = f"{SOURCE}={export.source}" if export.source is not None else f"export.dialect={dialects}"
    if (export.source is not None or dialects) and (run.plan or run.doctor is not None):
        other = "plan=true" if run.plan else f"doctor={run.doctor}"
        raise ConfigError(f"{asked} and {other} are two different jobs. Set one of them.")
    if len(set(dialects)) < len(dialects):
        raise ConfigError(f"export.dialect={dialects} names one twice. Name each dialect once.")
    if export.source is None:
        check_family(dialects, run.drafter.family)
    else:
        _check_source(run)
    if export.push is None:
        return
    if not dialects:
        raise ConfigError(
            f"export.push={export.push} says where dialects go, but export.dialect is empty. Set export.dialect to "
            f"some of {', '.join(DIALECTS)}."
        )
    if not REPOSITORY.fullmatch(export.push):
        raise ConfigError(f"export.push={export.push}: must be ORG/NAME, a repository on the hub.")


def _check_source(run: TrainRun) -> None:
    source = run.export.source
    if not Path(source).expanduser().is_dir():
        raise ConfigError(
            f"{SOURCE}={source}: there is no such folder (looked in {Path.cwd()}). Set {SOURCE} to an export folder."
        )
    if run.init_from is not None:
        raise ConfigError(
            f"init_from={run.init_from} is what training starts from, but with {SOURCE}={source} nothing is trained. "
            "Leave one of them out."
        )
    if not run.export.dialect:
        raise ConfigError(
            f"{SOURCE}={source} says what to write, but export.dialect is empty. Set export.dialect to some of "
            f"{', '.join(DIALECTS)}."
        )
