"""From names and folders to a ready engine."""

from __future__ import annotations

import copy
import dataclasses
import logging
from pathlib import Path

import torch

from drafters.config import TargetConfig
from drafters.drafter_path import DrafterPart, parse_drafter_path
from drafters.errors import ConfigError
from drafters.export.official import load_eagle3
from drafters.models.eagle3 import Eagle3Drafter
from drafters.target import Target, default_taps
from runtime.calibration import Calibration
from runtime.engine import Engine, EngineConfig
from runtime.packing import prepare
from runtime.proposers.base import Proposer
from runtime.proposers.eagle import EagleProposer
from runtime.proposers.merge import MergeProposer
from runtime.proposers.ngram import NgramProposer
from runtime.proposers.none import NoneProposer
from runtime.proposers.random import RandomProposer
from runtime.proposers.recycle import RecycleProposer
from runtime.proposers.small import SmallProposer, load_small
from runtime.proposers.suffix import SuffixProposer

log = logging.getLogger(__name__)


def load_target(target: Target | TargetConfig | str | Path) -> Target:
    """A Target as it is, or one loaded from a config, a folder or a hub id."""
    if isinstance(target, Target):
        return target
    if isinstance(target, TargetConfig):
        return Target.load(target)
    return Target.load(TargetConfig(name=Path(str(target)).name, path=str(target)))


def load_proposer(
    drafter: object, target: Target, config: EngineConfig, calibration: Calibration | None = None
) -> Proposer:
    """A proposer from a drafter.path (see parse_drafter_path), a drafter, or a Proposer as it is.

    An Eagle3Drafter is copied; (drafter, taps) says which hidden_states it taps, alone it taps the default ones.
    calibration: what a merged tree is ranked by; pass the engine's own, or its counts stay empty. Raises ConfigError,
    ArtifactError, ContractError, TargetError.
    """
    if isinstance(drafter, Proposer):
        return drafter
    if isinstance(drafter, Eagle3Drafter):
        drafter = (drafter, default_taps(target.num_layers))
    if isinstance(drafter, tuple):
        model, taps = drafter
        shared = {id(model.embedding): model.embedding}  # the target's own tensor need not be copied
        return _eagle(copy.deepcopy(model, shared), taps, target, config)
    parts = parse_drafter_path("none" if drafter is None else str(drafter))
    members = [_from_part(part, target, config) for part in parts]
    if len(members) == 1:
        return members[0]
    return MergeProposer(members, Calibration() if calibration is None else calibration)


def _from_part(part: DrafterPart, target: Target, config: EngineConfig) -> Proposer:
    if part.kind == "small":
        return _small(part.folder, target, config)
    if part.kind == "export":
        model, contract = load_eagle3(part.folder, target)
        log.info("drafter: %s (%s)", part.folder, contract.family)
        # A step of training-time test sees the steps before it, so one level more than it had steps is still sound.
        return _eagle(model, tuple(contract.tap_indices), target, config, contract.graph["ttt_steps"] + 1)
    return {
        "none": NoneProposer,
        "ngram": NgramProposer,
        "suffix": SuffixProposer,
        "recycle": lambda: RecycleProposer(target.vocab_size),
        "random": lambda: RandomProposer(target.vocab_size),
    }[part.kind]()


def _small(folder: Path, target: Target, config: EngineConfig) -> SmallProposer:
    proposer = load_small(folder, target, config.top_k)
    longest = min(config.max_length or target.max_length, target.max_length)
    if proposer.model.max_length < longest:
        raise ConfigError(
            f"drafter.path small:{folder} reads at most {proposer.model.max_length} tokens, but runtime.max_length is "
            f"{longest}. Set runtime.max_length={proposer.model.max_length}."
        )
    return proposer


def _eagle(
    model: Eagle3Drafter,
    taps: tuple[int, ...],
    target: Target,
    config: EngineConfig,
    trained_depth: int | None = None,
) -> EagleProposer:
    model.bind_embedding(target.embed_weight)
    model.to(target.device).eval().requires_grad_(False)
    for parameter in model.parameters():  # not model.to(dtype): rotary frequencies stay fp32
        parameter.data = parameter.data.to(target.dtype)
    prepare(model)
    return EagleProposer(model, taps, config.top_k, config.depth, trained_depth)


def load_engine(target: object, drafter: object = None, **settings: int) -> Engine:
    """See Engine.load; settings are EngineConfig's fields, an unknown one raises ConfigError."""
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    unknown = sorted(set(settings).difference(known))
    if unknown:
        raise ConfigError(f"runtime.{unknown[0]} is not a setting of the engine. Set one of {', '.join(known)}.")
    config = EngineConfig(**settings)
    loaded = load_target(target)
    calibration = Calibration()
    with torch.inference_mode(False):
        return Engine(loaded, load_proposer(drafter, loaded, config, calibration), config, calibration)
