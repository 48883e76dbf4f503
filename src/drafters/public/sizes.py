"""Sizes and flags in the config.json of a public drafter, with the defaults its makers' code has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from drafters.errors import ContractError
from drafters.models.base import SCALED_ROPES, misfit
from drafters.public.folder import PublicFolder
from drafters.target import Target

ROPE_THETA = 10000.0  # where config.json has none: EAGLE's, transformers' and the engines' default alike
OTHER = "Use an engine that runs it, or another drafter."


def size(folder: PublicFolder, config: dict[str, Any], key: str, default: int | float | None = None) -> Any:
    """A number of config.json; ArtifactError where it is no number, or absent with no default."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise folder.wrong(f"config.json: {key} is {value!r}, a number is needed", "Fetch the folder again.")
    return value


def layer_sizes(folder: PublicFolder, config: dict[str, Any], target: Target) -> dict[str, Any]:
    """Sizes of a drafter's Llama layer, the names being a shape's; errors name a field this code cannot run."""
    _check_layer(folder, config)
    hidden, heads = size(folder, config, "hidden_size"), size(folder, config, "num_attention_heads")
    length = config.get("max_position_embeddings") or config.get("max_sequence_length") or target.max_length
    theta, scaling = rope(folder, config)
    return {
        "hidden_size": hidden,
        "intermediate_size": size(folder, config, "intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": size(folder, config, "num_key_value_heads", heads),
        "head_dim": size(folder, config, "head_dim", hidden // heads),
        "rms_norm_eps": size(folder, config, "rms_norm_eps"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": length,
        "vocab_size": vocab_size(folder, config, target),
    }


def _check_layer(folder: PublicFolder, config: dict[str, Any]) -> None:
    one = {"num_hidden_layers": 1, "hidden_act": "silu", "mlp_bias": False}
    for key, expected in one.items():
        value = config.get(key, expected)
        if value != expected:
            raise folder.wrong(f"config.json: {key} is {value!r}, this code runs drafters with {expected!r}", OTHER)
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    slides = config.get("use_sliding_window", window is not None) or "sliding_attention" in (
        config.get("layer_types") or []
    )
    if slides and window is not None and not (longest is not None and window >= longest):
        raise folder.wrong(
            f"config.json: sliding_window is {window}, this code runs drafters that see the whole text", OTHER
        )


def vocab_size(folder: PublicFolder, config: dict[str, Any], target: Target) -> int:
    """The target's vocabulary, which config.json has to name too; ContractError where it names another."""
    found = size(folder, config, "vocab_size", target.vocab_size)
    if found != target.vocab_size:
        raise ContractError(
            f"{folder.path}: config.json: vocab_size is {found}, target {target.name!r} has {target.vocab_size}. Set "
            "target.path to the model that this drafter was made for."
        )
    return found


def rope(folder: PublicFolder, config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """rope_theta and the scaling, of a config.json in transformers' old or new spelling."""
    new, old = dict(config.get("rope_parameters") or {}), dict(config.get("rope_scaling") or {})
    theta = new.pop("rope_theta", None)
    stated = config.get("rope_theta")
    if theta is not None and stated is not None and theta != stated:
        raise folder.wrong(f"config.json: rope_theta is {stated} and in rope_parameters {theta}", "Leave one of them.")
    scalings = []
    for each in (new, old):
        each.pop("rope_theta", None)
        named = {key: value for key, value in each.items() if key not in ("type", "rope_type") and value is not None}
        scalings.append({"rope_type": each.get("rope_type", each.get("type", "default"))} | named)
    scaling, other = scalings if new else scalings[::-1]
    if new and old and other != scaling:
        raise folder.wrong("config.json: rope_scaling and rope_parameters differ", "Leave one of them.")
    kind = scaling["rope_type"]
    found = float(theta if theta is not None else ROPE_THETA if stated is None else stated)
    if kind == "default":
        return found, None
    if kind not in SCALED_ROPES:
        known = ", ".join(["default", *SCALED_ROPES])
        raise folder.wrong(f"config.json: rope_type is {kind!r}, this code runs {known}", OTHER)
    problem = misfit(scaling)
    if problem is not None:
        raise folder.wrong(f"config.json: {problem} in the rope_scaling of type {kind}", "Fetch the folder again.")
    return found, scaling


def said(folder: PublicFolder, places: Iterable[dict[str, Any]], key: str) -> bool | None:
    """A flag that config.json has in one of some places; None: in none of them."""
    found = [place[key] for place in places if place.get(key) is not None]
    if any(not isinstance(value, bool) for value in found) or len(set(found)) > 1:
        raise folder.wrong(f"config.json: {key} is {found}, one true or false is needed", "Fetch the folder again.")
    return found[0] if found else None


def flag(folder: PublicFolder, places: Iterable[dict[str, Any]], key: str, tensor: str) -> bool:
    """Whether a graph has the part that `tensor` is of; ArtifactError where config.json says otherwise."""
    there, claimed = tensor in folder.files, said(folder, places, key)
    if claimed is not None and claimed != there:
        raise folder.wrong(
            f"config.json: {key} is {str(claimed).lower()}, but tensor {tensor} is {'there' if there else 'missing'}",
            "Fetch the folder again.",
        )
    return there


def check_target_width(folder: PublicFolder, found: int, key: str, target: Target) -> None:
    """ContractError where a drafter was made for states of another width than the target's."""
    if found != target.hidden_size:
        raise ContractError(
            f"{folder.path}: config.json: {key} is {found}, target {target.name!r} has hidden states of "
            f"{target.hidden_size}. Set target.path to the model that this drafter was made for."
        )
