"""A small language model as a plain Hugging Face folder, to be imported; to draft with it no import is needed."""

from __future__ import annotations

from drafters.errors import ConfigError
from drafters.models.small import SmallShape
from drafters.public.eagle3 import same
from drafters.public.folder import PublicFolder
from drafters.public.reading import PublicDrafter, Reading
from drafters.public.sizes import layer_sizes, size
from drafters.public.vocab import row_map
from drafters.target import Target

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def read_small(folder: PublicFolder, target: Target) -> PublicDrafter:
    """The reading of a Llama with the target's vocabulary; ConfigError where its embedding or head have no place."""
    names = {name.removeprefix("model."): name for name in folder.names()}
    found = folder.read(names.values())
    tensors = {own: found[theirs] for own, theirs in names.items()}
    layers = size(folder, folder.config, "num_hidden_layers")
    sizes = layer_sizes(folder, folder.config | {"num_hidden_layers": 1}, target)
    if sizes.pop("rope_scaling") is not None:
        raise _unplaced(folder, "its rope is scaled")
    embed, head = tensors.pop("embed_tokens.weight", None), tensors.pop("lm_head.weight", None)
    tied = head is None or (embed is not None and same(head, embed))
    if sizes["hidden_size"] == target.hidden_size:
        if embed is None or not same(embed, target.embed_weight):
            raise _unplaced(folder, f"{EMBED} is not the target's")
        if not same(embed if tied else head, target.head_weight):
            raise _unplaced(folder, f"its output head, {EMBED if tied else HEAD}, is not the target's")
    elif not tied:
        raise _unplaced(folder, f"{HEAD} is not {EMBED}")
    else:
        tensors["embed_tokens.weight"] = embed
    draft_ids = len(tensors["d2t"]) if "d2t" in tensors else sizes["vocab_size"]
    rows = row_map(folder, tensors, draft_ids, sizes["vocab_size"])
    shape = SmallShape(target_hidden_size=target.hidden_size, num_layers=layers, draft_vocab_size=draft_ids, **sizes)
    reading = Reading("a language model of its own", shape, tensors | rows.tensors(sizes["vocab_size"]), ())
    return PublicDrafter(folder.path, "small", "small", (reading,), (), names)


def _unplaced(folder: PublicFolder, problem: str) -> ConfigError:
    return ConfigError(
        f"drafter.path={folder.path}: {problem}, for which an export has no place. No import is needed to draft with "
        f"it: set drafter.path=small:{folder.path}."
    )
