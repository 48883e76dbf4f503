"""EAGLE-1 and -2 drafters as EAGLE writes them and as vLLM and SGLang read them."""

from __future__ import annotations

import logging

from torch import Tensor

from drafters.models.eagle import EagleShape
from drafters.public.eagle3 import (
    DERIVED,
    add_output_bias,
    borrowing_doubts,
    draft_vocab_size,
    own_embedding,
    renamed,
    same,
    vocab_doubts,
)
from drafters.public.folder import PublicFolder
from drafters.public.reading import PublicDrafter, Reading
from drafters.public.sizes import check_target_width, flag, layer_sizes
from drafters.public.vocab import RowMap, row_map
from drafters.target import Target

log = logging.getLogger(__name__)
WHOLE = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")


def own_name(name: str) -> str:
    """The drafter's name of a tensor of the file."""
    name = name.removeprefix("model.")
    return name if name in WHOLE else f"block.{name.removeprefix('layers.0.')}"


def read_eagle(folder: PublicFolder, target: Target) -> PublicDrafter:
    """The reading of an EAGLE folder; ArtifactError, ContractError name a tensor or field that cannot be."""
    kept = [name for name in folder.names() if not name.endswith(DERIVED)]
    names = renamed(folder, {name: own_name(name) for name in kept})
    found = folder.read(names.values())
    tensors = {own: found[theirs] for own, theirs in names.items()}
    sizes = layer_sizes(folder, folder.config, target)
    width = sizes.pop("hidden_size")
    check_target_width(folder, width, "hidden_size", target)
    fc_bias = flag(folder, [], "bias", names.get("block.fc.bias", "fc.bias"))
    if not fc_bias and folder.config.get("bias"):
        raise folder.wrong("config.json: bias is true, but tensor fc.bias is missing", "Fetch the folder again.")
    if fc_bias and not bool(tensors["block.fc.bias"].any()):
        log.info("%s: fc.bias is 0, as SGLang needs it: left out", folder.path)
        del tensors["block.fc.bias"]
        fc_bias = False
    if fc_bias and folder.config.get("bias") is False:
        raise folder.wrong("config.json: bias is false, but tensor fc.bias is not 0", "Fetch the folder again.")
    add_output_bias(folder, tensors, "block.self_attn.", width)
    head = tensors.pop("lm_head.weight", None)
    draft_ids = draft_vocab_size(folder, folder.config, tensors, head, sizes["vocab_size"])
    rows = row_map(folder, tensors, draft_ids, sizes["vocab_size"])
    tensors |= rows.tensors(sizes["vocab_size"])
    stored, head = head, _own_head(folder, head, rows, tensors["t2d"], target)
    shape = EagleShape(
        target_hidden_size=width,
        **sizes,
        draft_vocab_size=draft_ids,
        fc_bias=fc_bias,
        attention_bias="block.self_attn.q_proj.bias" in tensors,
        own_embedding=own_embedding(folder, tensors, width, target),
        own_head=head is not None,
    )
    if head is not None:
        tensors["lm_head.weight"] = head
    reading = Reading("the last state, after the final norm", shape, tensors, (target.num_layers,))
    doubts = vocab_doubts(reading, rows, None if head is None else stored) + borrowing_doubts(reading)
    return PublicDrafter(folder.path, "eagle", "eagle", (reading,), doubts, names)


def _own_head(folder: PublicFolder, head: Tensor | None, rows: RowMap, t2d: Tensor, target: Target) -> Tensor | None:
    """Its output head in the order of ids; None where it has none, or the target's."""
    if head is None:
        return None
    head = rows.order(head)
    if same(head, target.head_weight[t2d.to(target.device)]):
        log.info("%s: lm_head.weight is the target's own, which is shared", folder.path)
        return None
    return head
