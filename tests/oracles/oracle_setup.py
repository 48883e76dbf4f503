"""Drafters of random weights, the states they read, and what they say when run as decoding runs them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafters.export.forms import write_form
from drafters.export.source import Source
from drafters.models.eagle3 import Eagle3Drafter, Eagle3Shape
from drafters.models.layers import causal_attention
from drafters.target import Target
from tests.drafters.export_setup import TAPS, export
from tests.drafters.forms_setup import source_of

TOLERANCE = 1e-4
STEPS = 3
TEXT = "One day it met a farmer, and asked him for three apples. def area(width, height): return width * height"
IDS = torch.randint(3, 500, (1, 14), generator=torch.Generator().manual_seed(5))


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip where a peer is not installed: `make oracles` has them all in an environment of its own."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(absent), reason=f"{', '.join(absent)} is not installed: run `make oracles`")


def written(
    target: Target, shape: Eagle3Shape, dialect: str, root: Path, taps: tuple[int, ...] = TAPS
) -> tuple[Source, Path]:
    """A drafter of random weights as an export has it, and its folder in a dialect."""
    source = source_of(export(target, root / "native", shape, taps), target)
    return source, write_form(dialect, source, root / dialect)


def states(target: Target, taps: tuple[int, ...] = TAPS, ids: Tensor = IDS) -> Tensor:
    """Tapped states of ids [1, T]: [1, T, len(taps)*Ht]."""
    length = ids.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    return target.hidden(ids, torch.arange(length)[None], mask, taps)[0]


@torch.no_grad()
def chains(drafter: Eagle3Drafter, taps: Tensor, ids: Tensor = IDS) -> list[Tensor]:
    """Logits [T-STEPS, Vd] of each step of the chains that begin at token 1, 2, ... of ids [1, T], with ids for drafts.

    Every chain is run on its own, the whole text before it anew: no cache and no mask to be wrong about.
    """
    fused = drafter.fuse(taps)
    said: list[list[Tensor]] = [[] for _ in range(STEPS)]
    for begin in range(1, ids.shape[1] - STEPS + 1):
        hidden = fused[:, :begin]
        for step in range(STEPS):
            read, places = ids[:, 1 : begin + 1 + step], torch.arange(begin + step)[None]
            out = drafter.forward_layer(read, hidden, places, causal_attention)
            said[step].append(drafter.logits(out[0, -1]))
            hidden = torch.cat((hidden, drafter.feedback(out[:, -1:])), 1)
    return [torch.stack(step) for step in said]


def assert_same(mine: list[Tensor], theirs: list[Tensor]) -> None:
    """Logits of both agree step by step, over the chains both have."""
    assert len(mine) == len(theirs)
    for step, (own, other) in enumerate(zip(mine, theirs, strict=True)):
        gap = (own - other[: len(own)]).abs().max().item()
        assert own.std() > 0.1 and gap < TOLERANCE, f"step {step}: logits differ by {gap:.2e}"


def text_ids(target: Target) -> Tensor:
    """TEXT as ids [1, T]."""
    return torch.tensor([target.tokenizer(TEXT)["input_ids"]])
