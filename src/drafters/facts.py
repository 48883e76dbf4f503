"""The target's shape: kept in conf/target, checked against its config.json wherever that can be had."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafters.config import TargetConfig, TargetFacts
from drafters.errors import TargetError

if TYPE_CHECKING:
    from drafters.config_drafter import InnerSizes
    from drafters.target import Target

HUB_TIMEOUT = 3  # seconds
CONFIG_NAMES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "tie_word_embeddings": "tie_word_embeddings",
}


def known_facts(target: TargetConfig) -> TargetFacts | None:
    """Shape kept in the settings (target.facts, or that of a random target); None for a custom target."""
    if target.facts is not None:
        return target.facts
    if target.random is None:
        return None
    shape = target.random
    return TargetFacts(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=False,
    )


def fetch_config(target: TargetConfig) -> tuple[dict[str, Any] | None, str]:
    """(config.json of target.path from a local folder or the hub, how it was found); (None, why) without a way to it.

    Raises TargetError when target.path names no model at all.
    """
    if target.path is None:
        return None, "from the settings: the target is pinned there"
    folder = Path(target.path).expanduser()
    if folder.is_dir():
        file = folder / "config.json"
        if not file.is_file():
            raise TargetError(f"target.path={target.path} has no config.json. Set target.path to a model folder.")
        return json.loads(file.read_text(encoding="utf-8")), f"config.json in {target.path}"
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(target.path, "config.json", revision=target.revision)
        if not isinstance(file, str):
            # Asked first because it tries once; the download goes on trying for half a minute.
            get_hf_file_metadata(hf_hub_url(target.path, "config.json", revision=target.revision), timeout=HUB_TIMEOUT)
            file = hf_hub_download(target.path, "config.json", revision=target.revision, etag_timeout=HUB_TIMEOUT)
        return json.loads(Path(file).read_text(encoding="utf-8")), f"config.json of {target.path} on the hub"
    except HFValidationError as error:
        raise TargetError(
            f"target.path={target.path} is neither a folder here nor a hub id. Set target.path to one of them."
        ) from error
    except Exception as error:
        # DNS, proxy, licence and server trouble come as many kinds; the kept facts serve in all of them.
        return None, f"hub not reachable for {target.path} ({type(error).__name__}), using kept facts"


def read_facts(target: TargetConfig) -> tuple[TargetFacts, str]:
    """Shape of the target and how it was checked; raises TargetError naming the first field that differs."""
    kept = known_facts(target)
    found, where = fetch_config(target)
    if found is None:
        if kept is None:
            raise TargetError(
                f"target.path={target.path}: its config.json cannot be had and no target.facts are kept for it. "
                f"Set target.path to a local model folder, or bring the hub within reach."
            )
        return kept, where
    found = found.get("text_config") or found
    if kept is None:
        return facts_from(found, target), f"read from {where}"
    for field, theirs in CONFIG_NAMES.items():
        ours = asdict(kept)[field]
        # Older config.json files leave out what has a default.
        if found.get(theirs) is not None and found[theirs] != ours:
            raise TargetError(
                f"target.facts.{field} is {ours}, but {theirs} is {found[theirs]} in {where}. "
                f"Set target.facts.{field}={found[theirs]}, or target.path to the model meant."
            )
    return kept, f"checked against {where}"


def facts_from(config: dict[str, Any], target: TargetConfig) -> TargetFacts:
    """Shape in a model's config.json, with transformers' defaults; raises TargetError naming a field it lacks."""
    values = {field: config[theirs] for field, theirs in CONFIG_NAMES.items() if config.get(theirs) is not None}
    for field in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "vocab_size"):
        if field not in values:
            raise TargetError(
                f"config.json of target.path={target.path} has no {CONFIG_NAMES[field]}: it is no causal language "
                f"model this plan knows. Set target.path to another model."
            )
    values.setdefault("num_kv_heads", values["num_heads"])
    values.setdefault("head_dim", values["hidden_size"] // values["num_heads"])
    values.setdefault("tie_word_embeddings", False)
    return TargetFacts(**values)


def sizes_for(cfg: InnerSizes, target: Target) -> dict[str, int]:
    """Sizes of a drafter's decoder layer; those its settings leave null, or lack, are the target's."""
    facts = facts_from(target.text_config.to_dict(), target.config)
    names = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    own = {name: getattr(cfg, name) for name in names if name in cfg.__dataclass_fields__}
    return {name: getattr(facts, name) if own.get(name) is None else own[name] for name in names}
