"""The grammar of drafter.path: a way of proposing, a model folder, a drafter, or several of them joined by +."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from drafters.errors import ConfigError

BUILT_IN = ("none", "ngram", "suffix", "recycle", "random")
SMALL = "small:"
CHOICES = (
    f"an export folder, {', '.join(BUILT_IN)}, small:FOLDER, or several of them joined by +; a drafter made elsewhere "
    "goes by its folder or its hub id"
)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class DrafterPart:
    """One drafter of a path. kind: a name of BUILT_IN, small or export with its folder, or hub with its hub id."""

    kind: str
    folder: Path | None = None
    hub_id: str | None = None


def parse_drafter_path(path: str, setting: str = "drafter.path") -> tuple[DrafterPart, ...]:
    """The drafters a drafter.path names, in order; raises ConfigError naming the part that cannot be, and `setting`.

    A folder that exists may have + in its name: from the left, the longest run of parts that is a folder is one.
    """
    pieces = path.split("+")
    parts: list[DrafterPart] = []
    while pieces:
        size = next((n for n in range(len(pieces), 0, -1) if _part("+".join(pieces[:n])) is not None), None)
        if size is None:
            raise ConfigError(
                f"{setting}={path}: {_wrong(pieces[0])} (looked in {Path.cwd()}). Set {setting} to {CHOICES}."
            )
        parts.append(_part("+".join(pieces[:size])))
        pieces = pieces[size:]
    twice = next((part for index, part in enumerate(parts) if part in parts[:index]), None)
    if twice is not None:
        name = twice.folder or twice.hub_id or twice.kind
        raise ConfigError(f"{setting}={path} names {name} twice. Name each drafter once.")
    if len(parts) > 1 and DrafterPart("none") in parts:
        raise ConfigError(f"{setting}={path}: none drafts nothing and cannot be joined. Leave it out.")
    return tuple(parts)


def _part(text: str) -> DrafterPart | None:
    if text in BUILT_IN:
        return DrafterPart(text)
    kind = "small" if text.startswith(SMALL) else "export"
    name = text.removeprefix(SMALL) if kind == "small" else text
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return DrafterPart(kind, folder)
    # Where the first half is a folder here, it is a path mistyped rather than the name of an organisation.
    if kind == "export" and HUB_ID.fullmatch(text) and not Path(text).exists() and not Path(text).parent.is_dir():
        return DrafterPart("hub", hub_id=text)
    return None


def _wrong(text: str) -> str:
    if text.startswith(SMALL):
        return f"small: names no folder that exists, {text.removeprefix(SMALL)!r}"
    return f"{text!r} is not a drafter: there is no such folder"
