"""Which format a public folder is in, by its tensors and by what config.json says of itself."""

from __future__ import annotations

import re
from collections.abc import Callable

from drafters.errors import ConfigError
from drafters.public.folder import PublicFolder

# Architectures and kinds of drafters that this code has no graph for.
UNREAD = re.compile(r"dflash|dspark|domino|peagle|p-eagle|mlpspeculator|redrafter|hydra", re.IGNORECASE)


def _starts(*prefixes: str) -> Callable[[PublicFolder], bool]:
    return lambda folder: any(name.startswith(prefixes) for name in folder.files)


def _is_eagle3(folder: PublicFolder) -> bool:
    parts = ("midlayer.", "layers.0.hidden_norm.")
    return any(name.removeprefix("model.").startswith(parts) for name in folder.files)


def _is_eagle(folder: PublicFolder) -> bool:
    names = {name.removeprefix("model.") for name in folder.files}
    return "fc.weight" in names and any(name.startswith("layers.0.") for name in names)


def _is_mtp(folder: PublicFolder) -> bool:
    return any(name.endswith("eh_proj.weight") for name in folder.files) or _starts(
        "mtp.", "mtp_layers.", "model.mtp_layers."
    )(folder)


def _is_medusa(folder: PublicFolder) -> bool:
    own = re.compile(r"(\w+\.)?\d+\.\d+\.linear\.weight")
    return any(own.fullmatch(name) for name in folder.files) or _starts("blocks.", "medusa_heads.")(folder)


def _is_small(folder: PublicFolder) -> bool:
    return _starts("model.layers.", "model.embed_tokens.")(folder)


# In this order: an MTP folder may hold the model that it belongs to, and so may a folder with Medusa heads.
FORMATS: dict[str, Callable[[PublicFolder], bool]] = {
    "eagle3": _is_eagle3,
    "medusa": _is_medusa,
    "mtp": _is_mtp,
    "eagle": _is_eagle,
    "small": _is_small,
}


def recognise(folder: PublicFolder) -> str:
    """The format of FORMATS that a folder is in; ConfigError where it is none that this code reads."""
    kind = str(folder.config.get("speculators_model_type") or "")
    claims = [*(folder.config.get("architectures") or []), kind, str(folder.config.get("hydra_head_arch") or "")]
    unread = next((claim for claim in claims if UNREAD.search(claim)), None)
    unread = "hydra" if unread is None and "hydra_num_heads" in folder.config else unread
    found = next((name for name, holds in FORMATS.items() if holds(folder)), None) if unread is None else None
    if found is None or kind not in ("", found):
        what = unread or (kind if kind and found else None)
        names = ", ".join(folder.names()[:3])
        told = f"it is a {what} drafter" if what else f"its tensors ({names}, ..) are of no drafter"
        raise ConfigError(
            f"drafter.path={folder.path}: {told}; those read here are {', '.join(FORMATS)}. Set drafter.path to one of "
            "them, or to an export of train.py."
        )
    return found
