"""Which positions of packed rows take part in which draft step, for every family.

Position t sees the target's features up to t and token t+1, and predicts token t+2; step j repeats this j tokens
further on the drafter's own features. A position takes part in step j when tokens t+2 .. t+2+j are all response
tokens of its document: those are the drafts that decoding can reach. Prompt positions need keys and values only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.batches import Batch
from drafters.losses import Teacher
from drafters.models.attention import Segment


@dataclass(frozen=True)
class Step:
    """One draft step over S rows: `kept` [S] indexes the previous step's rows, `reach` [S] the active positions.

    tokens [S] are the teacher-forced ids fed in, teacher [S] indexes the layout's teacher positions.
    """

    kept: Tensor
    reach: Tensor
    position_ids: Tensor
    tokens: Tensor
    teacher: Tensor
    segments: list[Segment]


@dataclass(frozen=True)
class Layout:
    """Which positions of a batch do what; flat indices into [B*T].

    active [A]: positions that have a next token, hence keys; teacher [R]: positions whose next token is a response
    token, where the target's distribution is a label.
    """

    active: Tensor
    tokens: Tensor
    position_ids: Tensor
    teacher: Tensor
    steps: list[Step]

    def counts(self) -> list[int]:
        """Return the number of supervised positions of each step."""
        return [len(step.reach) for step in self.steps]


def _ahead(x: Tensor, shift: int, fill: int) -> Tensor:
    """Shift x [B, T] left by `shift`, filling the tail."""
    tail = torch.full((x.shape[0], min(shift, x.shape[1])), fill, dtype=x.dtype, device=x.device)
    return torch.cat((x[:, shift:], tail), dim=1)


def _segments(documents: Tensor, active: Tensor, rows: Tensor) -> list[Segment]:
    """Find each document's run of active positions and of query rows; documents [B*T] are unique numbers."""
    runs = documents[active]
    starts = torch.cat((runs.new_zeros(1), (runs[1:] != runs[:-1]).nonzero().flatten() + 1)) if len(runs) else runs
    ends = torch.cat((starts[1:], starts.new_tensor([len(runs)]))) if len(runs) else runs
    q_starts = torch.searchsorted(rows, active[starts])
    q_ends = torch.searchsorted(rows, active[ends - 1], right=True)
    found = zip(q_starts.tolist(), q_ends.tolist(), starts.tolist(), ends.tolist(), strict=True)
    return [Segment(*bounds) for bounds in found if bounds[1] > bounds[0]]


def make_layout(batch: Batch, ttt_steps: int, ahead: int = 1) -> Layout:
    """Lay a batch of packed rows out for `ttt_steps` draft steps; no step ever crosses a document.

    ahead: how far the token read at a position is ahead of it; 0 for a language model of its own, which reads token t
    there and predicts t+1.
    """
    rows, length = batch.ids.shape
    real = batch.document_ids >= 0
    unique = batch.document_ids + torch.arange(rows)[:, None] * length
    unique = torch.where(real, unique, -1)

    def inside(shift: int) -> Tensor:
        return (real & (_ahead(unique, shift, -1) == unique)).view(-1)

    def answers(shift: int) -> Tensor:
        return inside(shift) & _ahead(batch.loss_mask.long(), shift, 0).bool().view(-1)

    active = inside(1).nonzero().flatten()
    teacher = answers(1).nonzero().flatten()
    ids, positions = batch.ids.view(-1), batch.position_ids.view(-1)
    steps: list[Step] = []
    taking = torch.ones(rows * length, dtype=torch.bool)
    previous = None
    for j in range(ttt_steps):
        taking = taking & answers(j + 1 + ahead)
        at = taking.nonzero().flatten()
        reach = torch.searchsorted(active, at)
        steps.append(
            Step(
                kept=reach if previous is None else torch.searchsorted(previous, at),
                reach=reach,
                position_ids=positions[at] + j,
                tokens=ids[at + ahead + j],
                teacher=torch.searchsorted(teacher, at + ahead + j),
                segments=_segments(unique.view(-1), active, at),
            )
        )
        previous = at
    return Layout(active, ids[active + ahead], positions[active], teacher, steps)


@dataclass(frozen=True)
class Features:
    """The target's side of a batch: taps [A, taps*Ht] at active positions and the teacher at teacher positions."""

    taps: Tensor
    teacher: Teacher


@dataclass(frozen=True)
class Inputs:
    """A batch for a graph that runs the target itself: ids, position_ids [B, T], mask bool [B, 1, T, T]."""

    ids: Tensor
    position_ids: Tensor
    mask: Tensor
