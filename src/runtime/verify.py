"""The walk down a tree along tokens the target itself chose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runtime.tree import DraftTree


@dataclass(frozen=True)
class Verification:
    """path: accepted nodes in order, the root first. next_token: the target's own token after the last of them."""

    path: tuple[int, ...]
    next_token: int


def walk(tree: DraftTree, choice: Callable[[int], int]) -> Verification:
    """Follows, from the root, the child that equals the target's choice; the first miss is the next token.

    choice: the target's own token after a node; asked once, in order, for each node of the path and no other. The
    text is the target's own whatever the tree holds.
    """
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens))}
    path = [0]
    while True:
        token = choice(path[-1])
        node = children.get((path[-1], token))
        if node is None:
            return Verification(tuple(path), token)
        path.append(node)


def verify(tree: DraftTree, choices: list[int]) -> Verification:
    """The walk along choices known for every node (see sampling.choose)."""
    return walk(tree, choices.__getitem__)
