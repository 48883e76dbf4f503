"""A drafter's folder from the hub."""

from __future__ import annotations

from pathlib import Path

from drafters.errors import ArtifactError
from drafters.target_sources import HUB_FILES, hub_snapshot


def hub_folder(hub_id: str, pickled: bool = False) -> Path:
    """The local snapshot of a drafter on the hub; ArtifactError where it cannot be had. pickled: weights kept as .bin
    and .pt too, which only the converter reads."""
    where = f"drafter.path {hub_id!r} (no folder here, so a hub id)"
    # An export of ours on the hub lists its README.md among the files it is sealed with.
    patterns = [*HUB_FILES, "*.md", *(["*.bin", "*.pt"] if pickled else [])]
    return hub_snapshot(hub_id, None, where, "drafter.path", patterns, ArtifactError)
