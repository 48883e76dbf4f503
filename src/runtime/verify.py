"""The one acceptance rule: walk the tree along the target's own choices."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.tree import DraftTree


@dataclass(frozen=True)
class Verification:
    """path: accepted nodes in order, the root first. next_token: the target's own token after the last of them."""

    path: tuple[int, ...]
    next_token: int


def verify(tree: DraftTree, choices: list[int]) -> Verification:
    """Follows, from the root, the child that equals the target's choice; the first miss is the next token.

    choices: the target's own token after each node (see sampling.choose). The text is the target's own
    whatever the tree holds.
    """
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens))}
    path = [0]
    while (node := children.get((path[-1], choices[path[-1]]))) is not None:
        path.append(node)
    return Verification(tuple(path), choices[path[-1]])
