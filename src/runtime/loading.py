"""From names and folders to a ready engine."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import torch

from drafters.config import TargetConfig
from drafters.drafter_path import DrafterPart, parse_drafter_path
from drafters.errors import ConfigError
from drafters.export.native import load_drafter
from drafters.models import Drafter
from drafters.target import Target
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

    A Drafter is copied; (drafter, taps) says which hidden_states it taps, alone it taps its family's usual ones.
    calibration: what a merged tree is ranked by; pass the engine's own, or its counts stay empty. Raises ConfigError,
    ArtifactError, ContractError, TargetError.
    """
    if isinstance(drafter, Proposer):
        return drafter
    if isinstance(drafter, Drafter):
        drafter = (drafter, drafter.usual_taps(target.num_layers))
    if isinstance(drafter, tuple):
        model, taps = drafter
        return _trained(model.clone(), taps, target, config)
    parts = parse_drafter_path("none" if drafter is None else str(drafter))
    members = [_from_part(part, target, config) for part in parts]
    if len(members) == 1:
        return members[0]
    return MergeProposer(members, Calibration() if calibration is None else calibration)


def _from_part(part: DrafterPart, target: Target, config: EngineConfig) -> Proposer:
    if part.kind == "small":
        return _small(part.folder, target, config)
    if part.kind == "export":
        model, contract = load_drafter(part.folder, target)
        log.info("drafter: %s (%s)", part.folder, contract.family)
        return _trained(model, contract.tap_indices, target, config, model.deepest(contract.graph))
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


def _trained(
    model: Drafter, taps: tuple[int, ...], target: Target, config: EngineConfig, deepest: int | None = None
) -> Proposer:
    """The proposer of a trained drafter, which is laid out for decoding; deepest: see Drafter.deepest."""
    model.to(target.device, target.dtype).eval().requires_grad_(False)
    model.bind(target)
    prepare(model)
    return EagleProposer(model, taps, config.top_k, config.depth, deepest)


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
