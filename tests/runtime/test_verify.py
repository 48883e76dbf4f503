import itertools

import torch

from runtime.sampling import SamplingParams, choose
from runtime.tree import DraftTree
from runtime.verify import verify, walk

VOCAB = 3


def test_walk_follows_the_targets_choice_to_the_first_miss():
    tree = DraftTree((9, 5, 6, 7, 8), (-1, 0, 0, 2, 3), (0, 1, 1, 2, 3))
    assert verify(tree, [6, 0, 7, 8, 4]).path == (0, 2, 3, 4)
    assert verify(tree, [6, 0, 7, 8, 4]).next_token == 4
    assert verify(tree, [6, 0, 1, 8, 4]).path == (0, 2)
    assert verify(tree, [6, 0, 1, 8, 4]).next_token == 1
    assert verify(tree, [0, 0, 7, 8, 4]).path == (0,)
    assert verify(DraftTree.root(9), [3]).next_token == 3


def test_walk_asks_at_the_path_alone_and_once():
    tree = DraftTree((9, 5, 6, 7, 8), (-1, 0, 0, 2, 3), (0, 1, 1, 2, 3))
    asked = []
    found = walk(tree, lambda node: asked.append(node) or [6, 0, 7, 1, 4][node])
    assert asked == [0, 2, 3]
    assert found == verify(tree, [6, 0, 7, 1, 4])


def _next(history: tuple[int, ...]) -> int:
    """A deterministic toy target."""
    return (sum((i + 1) * t for i, t in enumerate(history)) + len(history)) % VOCAB


def _paths(tree: DraftTree) -> list[tuple[int, ...]]:
    paths = [()]
    for node in range(1, len(tree)):
        paths.append((*paths[tree.parents[node]], tree.tokens[node]))
    return paths


def test_every_small_tree_gives_the_plain_text():
    """All trees of up to 3 drafts over 3 tokens: the emitted tokens are a prefix of plain decoding's."""
    trees = set()
    for size in range(4):
        for parents in itertools.product(*[range(node) for node in range(1, size + 1)]):
            for tokens in itertools.product(range(VOCAB), repeat=size):
                depths = [0]
                for parent in parents:
                    depths.append(depths[parent] + 1)
                if len(set(zip(parents, tokens))) == size:
                    trees.add(DraftTree((0, *tokens), (-1, *parents), tuple(depths)))
    assert len(trees) > 100
    plain = [0]
    for _ in range(6):
        plain.append(_next(tuple(plain)))
    for tree in trees:
        paths = _paths(tree)
        found = verify(tree, [_next((0, *path)) for path in paths])
        emitted = [*paths[found.path[-1]], found.next_token]
        assert emitted == plain[1 : 1 + len(emitted)]
        # the deepest path that agrees with plain decoding is accepted in full
        best = max(len(path) for path in paths if list(path) == plain[1 : 1 + len(path)])
        assert len(emitted) == best + 1


def test_sampled_choices_do_not_depend_on_the_tree():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.9, seed=5)
    alone = [int(choose(logits[i : i + 1], [10 + i], params)[0]) for i in range(6)]
    together = choose(logits, [10, 11, 12, 13, 14, 15], params).tolist()
    assert alone == together
    assert choose(logits, [10, 11, 12, 13, 14, 15], SamplingParams(temperature=0.9, seed=6)).tolist() != together
