"""Hands the schemas to Hydra's ConfigStore, and to OmegaConf the resolvers that conf/*.yaml uses."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from drafters.config import FAMILIES, RUNS, TargetConfig
from drafters.errors import ConfigError

EXPORT = "export"  # folder of a run that holds its drafter


def register() -> None:
    """Put the schemas under the group `schema`, where conf/*.yaml takes them from; doing it again changes nothing."""
    store = ConfigStore.instance()
    for name, node in RUNS.items():
        store.store(group="schema", name=name, node=node)
    for group, families in FAMILIES.items():
        for name, node in families.items():
            store.store(group=f"schema/{group}", name=name, node=node)
    resolvers = {
        "target_name": lambda *, _root_: _name_of(_root_),
        "run_folder": lambda *, _root_: _run_folder(_root_),
        "path_name": path_name,
        "file_name": lambda path: Path(path).name,
        "folder_of": lambda path: str(Path(path).parent),
        "short_hash": lambda text: hashlib.sha256(text.encode()).hexdigest()[:8],
    }
    for name, function in resolvers.items():
        OmegaConf.register_new_resolver(name, function, replace=True)


def _run_folder(root: DictConfig) -> str:
    """Name of the folder of a train.py run; one that trains nothing never lies in a training run's."""
    if root.export.source is not None:
        source = Path(root.export.source).expanduser()
        return f"export-{path_name(str(source.parent if source.name == EXPORT else source))}"
    name = f"{root.drafter.family}-{_name_of(root)}"
    return name if root.doctor is None else f"doctor-{name}"


def _name_of(root: DictConfig) -> str:
    if OmegaConf.is_missing(root, "target"):
        raise ConfigError("target has no value. Set target=OPTION.")
    return target_name(root.target)


def target_name(target: TargetConfig | DictConfig) -> str:
    """Name of the target for output folders: its own, or that of target.path where this replaces a built-in source."""
    if target.path and (target.wheel or target.random):
        return path_name(target.path)
    return target.name


def path_name(path: str | None) -> str:
    """Last part of a folder or hub id, in characters every file system takes; raises ConfigError when there is none."""
    name = Path(path or "").expanduser().name
    if not name:
        raise ConfigError("target.path has no value. Set target.path=FOLDER or target.path=ORG/MODEL.")
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)
