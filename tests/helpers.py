"""Composes a script's settings in this process, as the command line would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from drafters.cli import explain, spelled
from drafters.config_check import validate
from drafters.config_store import register

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"


def composed(script: str, *overrides: str, hydra: bool = False) -> DictConfig:
    """The composed config of a script, `hydra` node included on request."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(script, overrides=spelled(list(overrides)), return_hydra_config=hydra)


def settings(script: str, *overrides: str) -> Any:
    """The checked run object of a script."""
    return validate(composed(script, *overrides))


def complaint(script: str, *overrides: str) -> str:
    """The one line a wrong command line is answered with; fails when it is accepted."""
    try:
        settings(script, *overrides)
    except Exception as error:
        message = explain(error, script, list(overrides))
        assert message is not None, f"not explained: {error!r}"
        return message
    raise AssertionError(f"{script}.py {' '.join(overrides)} was accepted")
