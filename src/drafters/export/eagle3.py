"""EAGLE-3 in the official names (EAGLE: eagle/traineagle3), which SpecForge writes too; vLLM and SGLang read them."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from drafters.export.official import official_configs
from drafters.export.source import Source, save_config, save_weights


def eagle3_problem(source: Source) -> str | None:
    """What the official graph has no place for."""
    if source.graph.get("qk_norm"):
        return "its queries and keys pass norms (qk_norm), which official EAGLE-3 has not"
    return None


def eagle3_tensors(source: Source) -> dict[str, Tensor]:
    """The drafter's tensors; an output head [Vd, H] also where it reads the target's, and a draft vocabulary only where
    it is a part of the target's: vLLM and speculators have no place for a map of the whole."""
    head = {"lm_head.weight": source.draft_head} if not source.graph.get("own_head", True) else {}
    return (source.tensors if source.reduced else source.weights) | head


def write_eagle3(source: Source, folder: Path) -> None:
    """Write config.json, config.sglang.json where taps are custom, and model.safetensors."""
    for name, config in official_configs(source.contract, source.target).items():
        save_config(folder, config, name)
    save_weights(folder, eagle3_tensors(source))
