"""From a composed Hydra config to one frozen, checked run object, and what to say when that cannot be."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drafters.artifacts import joined_folders
from drafters.config import (
    RUNS,
    DistillRun,
    ServeRun,
    TargetConfig,
    TrainRun,
)  # fmt: skip
from drafters.config_allowed import describe, no_value, refuse_extra_keys
from drafters.config_base import Section
from drafters.config_drafter import (
    DrafterConfig,
    Eagle3Config,
    EagleConfig,
    HydraConfig,
    InnerSizes,
    Medusa2Config,
    MedusaConfig,
    RecurrentConfig,
)
from drafters.config_export import check_export
from drafters.config_serve import check_serve
from drafters.config_start import check_start
from drafters.config_store import target_name
from drafters.errors import ConfigError


def validate(cfg: DictConfig) -> TrainRun | DistillRun | ServeRun:
    """Typed, checked and frozen settings of a composed config; raises ConfigError naming the key path."""
    missing = OmegaConf.missing_keys(cfg)
    if missing:
        raise ConfigError(no_value(sorted(missing)[0]))
    refuse_extra_keys(cfg)
    run = OmegaConf.to_object(cfg)
    if not isinstance(run, tuple(RUNS.values())):
        raise ConfigError(f"the config is a {type(run).__name__}, not one of {', '.join(RUNS)}.")
    if run.target.path and (run.target.wheel or run.target.random):
        run.target = _custom_target(run.target)
    check(run)
    freeze(run)
    return run


def _custom_target(target: TargetConfig) -> TargetConfig:
    # The facts, licence and revision kept beside a built-in source say nothing about the model at target.path.
    return TargetConfig(
        name=target_name(target), path=target.path, revision=target.revision, dtype=target.dtype, device=target.device
    )


def freeze(section: Section) -> None:
    """Make a settings object and all sections below it read-only."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, Section):
            freeze(value)
    section.__dict__["_frozen"] = True


def to_dict(section: Section) -> dict[str, Any]:
    """Plain nested dict of the settings, ready for YAML or JSON."""
    return OmegaConf.to_container(OmegaConf.create(dataclasses.asdict(section)))


# ---- checks


def check(run: TrainRun | DistillRun | ServeRun) -> None:
    """Raise ConfigError for a value out of range or at odds with another, naming the key paths and the way out."""
    _check_ranges(run, "")
    _check_target(run.target)
    if isinstance(run, TrainRun | DistillRun):
        _check_data(run)
    if isinstance(run, TrainRun):
        _check_train(run)
    if isinstance(run, TrainRun | ServeRun):
        _check_runtime(run)
    if isinstance(run, ServeRun):
        check_serve(run)


def _check_ranges(section: Section, prefix: str) -> None:
    for field in dataclasses.fields(section):
        value, path = getattr(section, field.name), f"{prefix}{field.name}"
        if isinstance(value, Section):
            _check_ranges(value, f"{path}.")
        elif field.metadata and (value is not None or field.metadata["words"]):
            for entry in value if isinstance(value, list) else [value]:
                if not _allowed(entry, field.metadata):
                    raise ConfigError(f"{path}={value}: must be {describe(type(section), field.name)}.")


def _allowed(value: Any, rule: typing.Mapping[str, Any]) -> bool:
    if rule["choices"] is not None:
        return value in rule["choices"]
    if rule["words"] and (isinstance(value, bool) or not isinstance(value, int)):
        return value in rule["words"]
    return (
        (rule["low"] is None or value >= rule["low"])
        and (rule["above"] is None or value > rule["above"])
        and (rule["high"] is None or value <= rule["high"])
        and (rule["below"] is None or value < rule["below"])
    )


def _check_target(target: TargetConfig) -> None:
    if not (target.path or target.wheel or target.random):
        raise ConfigError(f"target.path is null for target {target.name!r}. Set target.path=FOLDER or ORG/MODEL.")
    if target.wheel and target.random:
        raise ConfigError(f"target {target.name!r} has both target.wheel and target.random. Set one of them to null.")
    kind = target.device.partition(":")
    if not (target.device in ("auto", "cpu", "cuda") or (kind[0] == "cuda" and kind[2].isdigit())):
        raise ConfigError(f"target.device={target.device}: must be auto, cpu, cuda or cuda:N.")


def _check_file(path: str | None, key: str, kind: str) -> None:
    if path is None:
        return
    found = Path(path).expanduser()
    if not (found.is_dir() if kind == "folder" else found.is_file()):
        raise ConfigError(
            f"{key}={path}: there is no such {kind} (looked in {Path.cwd()}). Set {key} to an existing one."
        )


def _check_data(run: TrainRun | DistillRun) -> None:
    data = run.data
    if data.source == "jsonl":
        _check_file(data.path, "data.path", "file")
    if data.responses is not None:
        if isinstance(run, DistillRun):
            raise ConfigError(
                f"data.responses={data.responses}: distill.py makes this folder, train.py reads it. "
                f"Set output_dir={data.responses} to say where it goes."
            )
        for folder in joined_folders(data.responses):
            if not folder.exists():
                raise ConfigError(
                    f"data.responses={data.responses}: there is no folder {folder} (looked in {Path.cwd()}). Make it "
                    f"with distill.py output_dir={folder}, or set data.responses=null to collect now."
                )


def _check_train(run: TrainRun) -> None:
    _check_file(run.init_from, "init_from", "folder")
    _check_file(run.doctor, "doctor", "folder")
    if run.doctor is not None and run.plan:
        raise ConfigError(f"plan=true and doctor={run.doctor} are two different jobs. Set one of them.")
    check_export(run)
    trainer, drafter = run.trainer, run.drafter
    if trainer.feature_store is not None and trainer.features != "cached":
        raise ConfigError(
            f"trainer.feature_store={trainer.feature_store} is read with trainer.features=cached only, but it is "
            f"{trainer.features}. Set trainer.features=cached, or trainer.feature_store=null."
        )
    if len(trainer.betas) != 2:
        raise ConfigError(f"trainer.betas={trainer.betas}: must be two numbers. Set trainer.betas=[0.9,0.95].")
    if isinstance(drafter, RecurrentConfig) and drafter.curriculum != sorted(set(drafter.curriculum)):
        raise ConfigError(f"drafter.curriculum={drafter.curriculum}: the fractions must rise. Set e.g. [0.35,0.6].")
    shape = run.target.facts or run.target.random
    if shape is not None and drafter.draft_vocab_size > shape.vocab_size:
        raise ConfigError(
            f"drafter.draft_vocab_size={drafter.draft_vocab_size} is more than the {shape.vocab_size} tokens of "
            f"target {run.target.name!r}. Set drafter.draft_vocab_size={shape.vocab_size} or less."
        )
    _check_objective(drafter)
    _check_warm_start(drafter)
    if isinstance(drafter, Medusa2Config):
        _check_tuning(run, drafter)
    check_start(run)
    if isinstance(drafter, InnerSizes):
        _check_sizes(drafter)
    if isinstance(drafter, Eagle3Config):
        _check_taps(drafter, run.target)


def _check_objective(drafter: DrafterConfig) -> None:
    defaults = type(drafter)()
    for name, objective in (("jsd_beta", "jsd"), ("lk_decay", "lk")):
        value = getattr(drafter, name)
        if value != getattr(defaults, name) and drafter.objective != objective:
            raise ConfigError(
                f"drafter.{name}={value} is read by drafter.objective={objective} only, but drafter.objective is "
                f"{drafter.objective}. Set drafter.objective={objective}, or leave drafter.{name} out."
            )
    if isinstance(drafter, EagleConfig) and drafter.feature_weight == drafter.logit_weight == 0:
        raise ConfigError(
            "drafter.feature_weight and drafter.logit_weight are both 0: nothing would be trained. Set one of them "
            "above 0."
        )


def _check_warm_start(drafter: DrafterConfig) -> None:
    if not isinstance(drafter, MedusaConfig | HydraConfig) or drafter.warm_start or drafter.own_heads:
        return
    if isinstance(drafter, MedusaConfig) or not drafter.prefix:
        raise ConfigError(
            f"drafter.warm_start=false has nothing to do in drafter={drafter.family} with drafter.own_heads=false: its "
            "heads read the target's own output head. Set drafter.own_heads=true, or leave drafter.warm_start out."
        )


def _check_tuning(run: TrainRun, drafter: Medusa2Config) -> None:
    """What does not go together with training an adapter of the target."""
    if run.trainer.features == "cached":
        raise ConfigError(
            f"trainer.features=cached keeps what a frozen target says, but drafter={drafter.family} trains the target "
            "too. Set trainer.features=online."
        )
    if run.deepspeed.zero_stage == 3:
        raise ConfigError(
            f"deepspeed.zero_stage=3 scatters weights, but those of drafter={drafter.family}'s adapter are part of the "
            "target, which is whole on every device. Set deepspeed=zero2 or less."
        )
    if drafter.lora_targets == []:
        raise ConfigError("drafter.lora_targets=[] tunes nothing. Set names such as [q_proj,v_proj], or null for all.")


def _check_sizes(drafter: InnerSizes) -> None:
    heads, groups = drafter.num_heads, drafter.num_kv_heads
    if heads is not None and groups is not None and heads % groups:
        raise ConfigError(
            f"drafter.num_heads={heads} is no multiple of drafter.num_kv_heads={groups}. "
            f"Set drafter.num_kv_heads to a divisor of {heads}."
        )


def _check_taps(drafter: Eagle3Config, target: TargetConfig) -> None:
    taps, shape = drafter.taps, target.facts or target.random
    if taps is None:
        return
    if len(taps) != 3 or taps != sorted(set(taps)):
        raise ConfigError(f"drafter.taps={taps}: must be three rising indices (low, middle, high), or null.")
    if shape is not None and taps[-1] > shape.num_layers:
        raise ConfigError(
            f"drafter.taps={taps}: target {target.name!r} has hidden states 0 to {shape.num_layers}. "
            f"Set drafter.taps within these, or null."
        )


def _check_runtime(run: TrainRun | ServeRun) -> None:
    _check_file(run.eval.prompts, "eval.prompts", "file")
    runtime = run.runtime
    if runtime.num_draft_tokens == "auto":
        if runtime.tree == "static":
            raise ConfigError(
                "runtime.tree=static needs a number of nodes, but runtime.num_draft_tokens=auto. Set "
                "runtime.num_draft_tokens=16, or runtime.tree=dynamic."
            )
        return
    if runtime.num_draft_tokens > 1 and runtime.depth > runtime.num_draft_tokens - 1:
        raise ConfigError(
            f"runtime.depth={runtime.depth} needs runtime.num_draft_tokens >= {runtime.depth + 1} (root included), "
            f"but it is {runtime.num_draft_tokens}. Raise it, or set runtime.depth={runtime.num_draft_tokens - 1}."
        )
