"""Debug mode: after every round everything that is kept is computed again from the text alone and compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from drafters.errors import OutriderError
from runtime.forward import Round, TargetRunner
from runtime.proposers.base import Held, Proposer

# Largest difference between two ways to compute the same, per unit of the largest value compared.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6, torch.bfloat16: 6e-2, torch.float16: 1e-2}


class DebugError(OutriderError):
    """Something kept between rounds is not what the text gives."""


@dataclass(frozen=True)
class Scratch:
    """What one forward over a text gives: hidden [T, Ht], taps [T, K*Ht], keys and values [Hkv, T, D] per layer."""

    hidden: Tensor
    taps: Tensor | None
    layers: list[tuple[Tensor, Tensor]]


@torch.inference_mode()
def recompute(runner: TargetRunner, ids: list[int]) -> Scratch:
    """One forward over ids with transformers' own cache and masks written out position by position."""
    where = torch.arange(len(ids), device=runner.target.device)
    behind = where[:, None] - where[None]
    masks = {
        kind: ((behind >= 0) & (behind < (window or len(ids) + 1)))[None, None]
        for kind, window in runner.windows.items()
    }
    cache = DynamicCache()
    out = runner.target.backbone(
        input_ids=torch.tensor([ids], device=runner.target.device),
        position_ids=where[None],
        attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
        cache=cache,
        use_cache=True,
        output_hidden_states=list(runner.taps) if runner.taps else False,
    )
    taps = torch.cat([out.hidden_states[i] for i in runner.taps], -1)[0] if runner.taps else None
    return Scratch(out.last_hidden_state[0], taps, [(layer.keys[0], layer.values[0]) for layer in cache.layers])


class Audit:
    """Compares a runner's and a proposer's state with the text; the runner must have been made with debug=True."""

    def __init__(self, runner: TargetRunner, proposer: Proposer):
        self.runner = runner
        self.proposer = proposer

    def check(self, rows: dict[int, list[int]]) -> None:
        """After a round: rows gives each running row's whole text, its last token being the next root.

        Raises DebugError naming the row, the field and both values.
        """
        last = self.runner.last
        if last is not None:
            for b in range(len(last.trees)):
                _compare(last.first + b, _masks(self.runner, last, b))
            self.runner.last = None  # the next round may be a prefill alone
        for row in range(self.runner.cache.num_rows):
            if row not in rows:
                _compare(row, cache_state(self.runner, row, [], None))
        for row, ids in rows.items():
            scratch = recompute(self.runner, ids[:-1])
            _compare(row, cache_state(self.runner, row, ids[:-1], scratch))
            if last is not None and last.first <= row < last.first + len(last.trees):
                _compare(row, _outputs(last, row - last.first, ids, scratch))
            _compare(row, self.proposer.audit(row, ids, scratch.taps))


def cache_state(runner: TargetRunner, row: int, ids: list[int], scratch: Scratch | None) -> Iterator[Held]:
    """A row's slots against a text; scratch: None for an empty row."""
    cache = runner.cache
    slots = cache.committed[row].nonzero()[:, 0]
    yield "cache length", cache.length(row), len(ids)
    yield "free slots", cache.free(row), cache.num_slots - len(ids)
    order = cache.positions[row, slots].sort()
    yield "positions of the committed slots", order.values.tolist(), list(range(len(ids)))
    if scratch is None:
        return
    where = slots[order.indices].to(runner.target.device)
    for number, (layer, (keys, values)) in enumerate(zip(cache.layers, scratch.layers)):
        yield f"keys of layer {number}", layer.keys[row].index_select(1, where), keys
        yield f"values of layer {number}", layer.values[row].index_select(1, where), values


def _masks(runner: TargetRunner, last: Round, b: int) -> Iterator[Held]:
    """What each node of a row saw: the text before the tree and its own path, as far as the window goes."""
    tree, slots, start = last.trees[b], last.slots[b], last.starts[b]
    if tree is None:
        return
    positions = runner.cache.positions[last.first + b].tolist()
    for kind, mask in last.masks.items():
        window = runner.windows[kind]
        for node in range(len(tree)):
            here = start + tree.depths[node]
            oldest = 0 if window is None else max(0, here - window + 1)
            seen = mask[b, node].nonzero()[:, 0].tolist()
            path = sorted(slots[up] for up in tree.path(node) if start + tree.depths[up] >= oldest)
            yield f"{kind} mask of node {node}: slots of the tree", sorted(set(seen).intersection(slots)), path
            text = sorted(positions[slot] for slot in set(seen).difference(slots))
            yield f"{kind} mask of node {node}: positions of the text", text, list(range(oldest, start))


def _outputs(last: Round, b: int, ids: list[int], scratch: Scratch) -> Iterator[Held]:
    """The round's outputs at the nodes that became text."""
    tree, start = last.trees[b], last.starts[b]
    if tree is None:
        return
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens))}
    path = [0]
    for token in ids[start + 1 : -1]:
        path.append(child[path[-1], token])
    end = start + len(path)
    yield "root of the tree", tree.tokens[0], ids[start]
    yield "hidden states of the accepted path", last.hidden[b, path], scratch.hidden[start:end]
    if last.taps is not None:
        yield "taps of the accepted path", last.taps[b, path], scratch.taps[start:end]


def _compare(row: int, pairs: Iterator[Held]) -> None:
    for field, held, truth in pairs:
        found = _difference(held, truth)
        if found is not None:
            raise DebugError(f"debug: row {row}, {field}: kept {found[0]}, from scratch {found[1]}.")


def _difference(held: object, truth: object) -> tuple[str, str] | None:
    if not isinstance(truth, Tensor):
        return None if held == truth else (str(held), str(truth))
    if held.shape != truth.shape:
        return f"shape {list(held.shape)}", f"shape {list(truth.shape)}"
    if not truth.numel():
        return None
    gap = (held.float() - truth.float()).abs()
    limit = TOLERANCE[truth.dtype] * max(1.0, float(truth.abs().max()))
    if float(gap.max()) <= limit:  # False for NaN
        return None
    worst = int(gap.nan_to_num(float("inf")).argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(worst), gap.shape)]
    return f"{float(held.flatten()[worst]):.6g} at {place}", f"{float(truth.flatten()[worst]):.6g}"
