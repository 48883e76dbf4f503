import pytest
import torch

from runtime.tree import DraftTree, best_nodes


def test_ancestors_of_a_small_tree():
    tree = DraftTree((9, 1, 2, 3, 4), (-1, 0, 0, 1, 3), (0, 1, 1, 2, 3))
    assert tree.ancestors().int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]


def test_chain_and_root():
    assert DraftTree.chain(7, [1, 2]) == DraftTree((7, 1, 2), (-1, 0, 1), (0, 1, 2))
    assert DraftTree.root(7) == DraftTree.chain(7, [])


@pytest.mark.parametrize(
    "tokens, parents, depths, word",
    [
        ((), (), (), "equally many"),
        ((1, 2), (-1,), (0, 1), "equally many"),
        ((1, 2), (0, 0), (0, 1), "root"),
        ((1, 2, 3), (-1, 2, 0), (0, 1, 1), "does not follow"),
        ((1, 2), (-1, 0), (0, 2), "does not follow"),
        ((1, 2, 2), (-1, 0, 0), (0, 1, 1), "twice"),
    ],
)
def test_malformed_trees_are_refused(tokens, parents, depths, word):
    with pytest.raises(ValueError, match=word):
        DraftTree(tokens, parents, depths)


def test_best_nodes_keeps_parents_at_ties():
    """A child with probability 1 scores exactly like its parent; an unstable top-k may keep it without the parent."""
    # candidates 0..3 at depth 1, then 4 children of each: child 4 of node 0 ties with node 0, and so on
    level = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    children = torch.tensor([-1.0] + [-9.0] * 3).repeat(4)
    scores = torch.cat([level, children])[None].repeat(64, 1)
    for keep in range(1, 12):
        kept = best_nodes(scores, keep)
        for row in kept.tolist():
            chosen = set(row)
            assert len(chosen) == keep
            assert all(node < 4 or (node - 4) // 4 in chosen for node in chosen)
    assert best_nodes(scores, 5)[0].tolist() == [0, 1, 2, 3, 4]


def test_best_nodes_takes_the_highest_scores():
    scores = torch.tensor([[-0.1, -3.0, -0.2, -5.0, -0.15]])
    assert best_nodes(scores, 3)[0].tolist() == [0, 2, 4]


def test_a_path_starts_at_the_root():
    tree = DraftTree((9, 1, 2, 3), (-1, 0, 0, 2), (0, 1, 1, 2))
    assert tree.path(3) == [0, 2, 3] and tree.path(0) == [0]
