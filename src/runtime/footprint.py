"""What a drafter adds to its target: weights of its own, and their bytes in memory."""

from __future__ import annotations

from drafters.target import Target
from runtime.packing import PackedLinear
from runtime.proposers.base import Proposer


def described(proposer: Proposer) -> str:
    """Its name, and its size where it has one: two drafters of one family take different times."""
    return f"{proposer.name} of {proposer.weights} weights" if proposer.weights else proposer.name


def memory_bytes(proposer: Proposer, target: Target) -> int:
    """Bytes of its weights and tables as they are laid out now, tensors shared with the target not among them."""
    shared = {tensor.untyped_storage().data_ptr() for tensor in (*target.model.parameters(), *target.model.buffers())}
    found: dict[int, int] = {}
    for model in proposer.models():
        for module in model.modules():
            if isinstance(module, PackedLinear):
                found[id(module)] = module.nbytes
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                place = tensor.untyped_storage().data_ptr()
                if place not in shared:
                    found[place] = tensor.untyped_storage().nbytes()
    return sum(found.values())
