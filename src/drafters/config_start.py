"""Whether the settings of a training run agree on what the drafter starts from."""

from __future__ import annotations

from drafters.config import TargetConfig, TrainRun
from drafters.config_drafter import MtpConfig, SmallConfig
from drafters.errors import ConfigError


def check_start(run: TrainRun) -> None:
    """Raise ConfigError where two settings disagree on what weights a drafter starts from."""
    drafter, native = run.drafter, isinstance(run.drafter, MtpConfig) and run.drafter.native
    if native and (run.init_from is not None or not drafter.warm_start):
        key = "drafter.warm_start=false" if run.init_from is None else f"init_from={run.init_from}"
        raise ConfigError(
            f"drafter.native=true takes the target's own MTP weights, {key} says otherwise. Leave one of them out."
        )
    if run.trainer.epochs == 0 and run.trainer.max_steps is None and not native and run.init_from is None:
        raise ConfigError(
            "trainer.epochs=0 trains nothing, so there must be weights to export. Set drafter=mtp drafter.native=true, "
            "or init_from=FOLDER, or trainer.epochs above 0."
        )
    if isinstance(drafter, SmallConfig) and drafter.layers is not None:
        _check_layers(drafter, run.target)


def _check_layers(drafter: SmallConfig, target: TargetConfig) -> None:
    layers, shape = drafter.layers, target.facts or target.random
    if layers != sorted(set(layers)) or len(layers) != drafter.num_layers:
        raise ConfigError(
            f"drafter.layers={layers}: must be drafter.num_layers={drafter.num_layers} rising indices. "
            f"Set drafter.num_layers={len(layers)}, or drafter.layers=null."
        )
    if not drafter.warm_start:
        raise ConfigError(
            f"drafter.layers={layers} says which layers to start as, drafter.warm_start=false to start as none. "
            "Leave one of them out."
        )
    if shape is not None and layers[-1] >= shape.num_layers:
        raise ConfigError(
            f"drafter.layers={layers}: target {target.name!r} has layers 0 to {shape.num_layers - 1}. "
            "Set drafter.layers within these, or null."
        )
