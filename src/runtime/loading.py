"""From names and folders to a ready engine."""

from __future__ import annotations

import copy
import dataclasses
import logging
from pathlib import Path

import torch

from drafters.config import TargetConfig
from drafters.errors import ArtifactError, ConfigError
from drafters.export.official import load_eagle3
from drafters.models.eagle3 import Eagle3Drafter
from drafters.target import Target, default_taps
from runtime.engine import Engine, EngineConfig
from runtime.packing import pack_linears
from runtime.proposers.base import Proposer
from runtime.proposers.eagle import EagleProposer
from runtime.proposers.ngram import NgramProposer
from runtime.proposers.none import NoneProposer

log = logging.getLogger(__name__)
BUILT_IN = {"none": NoneProposer, "ngram": NgramProposer}


def load_target(target: Target | TargetConfig | str | Path) -> Target:
    """A Target as it is, or one loaded from a config, a folder or a hub id."""
    if isinstance(target, Target):
        return target
    if isinstance(target, TargetConfig):
        return Target.load(target)
    return Target.load(TargetConfig(name=Path(str(target)).name, path=str(target)))


def load_proposer(drafter: object, target: Target, config: EngineConfig) -> Proposer:
    """A proposer from none, ngram, an export folder or a drafter; raises ArtifactError, ContractError.

    An Eagle3Drafter is copied; (drafter, taps) says which hidden_states it taps, alone it taps the default ones.
    """
    if isinstance(drafter, Proposer):
        return drafter
    if isinstance(drafter, Eagle3Drafter):
        drafter = (drafter, default_taps(target.num_layers))
    if isinstance(drafter, tuple):
        model, taps = drafter
        shared = {id(model.embedding): model.embedding}  # the target's own tensor need not be copied
        return _eagle(copy.deepcopy(model, shared), taps, target, config)
    name = "none" if drafter is None else str(drafter)
    if name in BUILT_IN:
        return BUILT_IN[name]()
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ArtifactError(
            f"drafter.path {name!r} is not a folder. Set drafter.path to an export made by train.py, "
            f"or to one of {', '.join(BUILT_IN)}."
        )
    model, contract = load_eagle3(folder, target)
    log.info("drafter: %s (%s)", folder, contract.family)
    return _eagle(model, tuple(contract.tap_indices), target, config)


def _eagle(model: Eagle3Drafter, taps: tuple[int, ...], target: Target, config: EngineConfig) -> EagleProposer:
    model.bind_embedding(target.embed_weight)
    model.to(target.device).eval().requires_grad_(False)
    for parameter in model.parameters():  # not model.to(dtype): rotary frequencies stay fp32
        parameter.data = parameter.data.to(target.dtype)
    pack_linears(model)
    return EagleProposer(model, taps, config.top_k, config.depth)


def load_engine(target: object, drafter: object = None, **settings: int) -> Engine:
    """See Engine.load; settings are EngineConfig's fields, an unknown one raises ConfigError."""
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    unknown = sorted(set(settings).difference(known))
    if unknown:
        raise ConfigError(f"runtime.{unknown[0]} is not a setting of the engine. Set one of {', '.join(known)}.")
    config = EngineConfig(**settings)
    loaded = load_target(target)
    with torch.inference_mode(False):
        return Engine(loaded, load_proposer(drafter, loaded, config), config)
