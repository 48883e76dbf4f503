"""The settings a training run left in its folder, as typed as they were."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drafters.config import (
    FAMILIES,
    DeepSpeedConfig,
    EvalConfig,
    LoggerConfig,
    RuntimeConfig,
    TargetConfig,
    TrainerConfig,
    TrainRun,
)
from drafters.config_check import freeze
from drafters.errors import ConfigError

NAME = "config.yaml"


def read_run(folder: Path) -> TrainRun:
    """Read folder/config.yaml of a train.py run; ConfigError where it is missing, of another script or version."""
    path = Path(folder) / NAME
    if not path.is_file():
        raise ConfigError(f"{path} is missing: {folder} is not the folder of a train.py run. Give such a folder.")
    try:
        raw = OmegaConf.load(path)
        schema = TrainRun(
            target=TargetConfig(),
            drafter=FAMILIES["drafter"][raw.drafter.family](),
            data=FAMILIES["data"][raw.data.source](),
            trainer=TrainerConfig(),
            deepspeed=DeepSpeedConfig(),
            runtime=RuntimeConfig(),
            eval=EvalConfig(),
            logger=LoggerConfig(),
        )
        run = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), raw))
    except (OmegaConfBaseException, AttributeError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{path} is not what this version of train.py writes ({reason}). Use the version that wrote it, or give "
            "the export folder with target=... and data.responses=...."
        ) from error
    freeze(run)
    return run
