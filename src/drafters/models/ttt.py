"""Training-time test of EAGLE-3 (EAGLE: eagle/traineagle3/cnets.py) on packed rows.

Position t sees the target's features up to t and token t+1, and predicts token t+2; step j repeats this j tokens
further on the drafter's own features. A position takes part in step j when tokens t+2 .. t+2+j are all response
tokens of its document: those are the drafts that decoding can reach. Prompt positions need keys and values only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from drafters.batches import Batch
from drafters.losses import Teacher, soft_cross_entropy
from drafters.models.attention import Segment, block_diagonal_attention
from drafters.models.eagle3 import Eagle3Drafter


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


def make_layout(batch: Batch, ttt_steps: int) -> Layout:
    """Lay a batch of packed rows out for `ttt_steps` draft steps; no step ever crosses a document."""
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
        taking = taking & answers(j + 2)
        at = taking.nonzero().flatten()
        reach = torch.searchsorted(active, at)
        steps.append(
            Step(
                kept=reach if previous is None else torch.searchsorted(previous, at),
                reach=reach,
                position_ids=positions[at] + j,
                tokens=ids[at + 1 + j],
                teacher=torch.searchsorted(teacher, at + 1 + j),
                segments=_segments(unique.view(-1), active, at),
            )
        )
        previous = at
    return Layout(active, ids[active + 1], positions[active], teacher, steps)


@dataclass(frozen=True)
class Features:
    """The target's side of a batch: taps [A, taps*Ht] at active positions and the teacher at teacher positions."""

    taps: Tensor
    teacher: Teacher


class TestTimeTraining(nn.Module):
    """The training graph around a drafter; its forward is what DeepSpeed wraps."""

    __test__ = False

    def __init__(self, drafter: Eagle3Drafter, decay: float) -> None:
        super().__init__()
        self.drafter = drafter
        self.decay = decay

    def forward(self, layout: Layout, features: Features) -> tuple[Tensor, Tensor]:
        """Return the decayed loss sum over all steps and fp32 statistics [4, steps].

        The statistics' rows: loss sum, positions whose draft equals the target's choice, positions where every
        draft so far did, supervised positions. A choice outside the draft vocabulary counts as a miss.
        """
        drafter, layer = self.drafter, self.drafter.midlayer
        device = features.taps.device
        hidden = drafter.fuse(features.taps)[None]
        joined = layer.inputs(drafter.embed(layout.tokens.to(device))[None], hidden)
        keys, values = layer.keys_values(joined, layout.position_ids.to(device)[None])
        loss = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=device)
        stats = torch.zeros(4, len(layout.steps), device=device)
        diagonal: list[tuple[Tensor, Tensor]] = []
        alive = torch.ones(len(layout.active), dtype=torch.bool, device=device)
        for j, step in enumerate(layout.steps):
            kept, position_ids = step.kept.to(device), step.position_ids.to(device)[None]
            hidden, alive = hidden[:, kept], alive[kept]
            diagonal = [(k[:, kept], v[:, kept]) for k, v in diagonal]
            if j == 0:
                joined = joined[:, kept]
            else:
                joined = layer.inputs(drafter.embed(step.tokens.to(device))[None], hidden)
                own_keys, own_values = layer.keys_values(joined, position_ids)
                diagonal.append((own_keys[0], own_values[0]))
            queries = layer.queries(joined, position_ids)[0]
            mixed = block_diagonal_attention(
                queries, keys[0], values[0], diagonal, step.segments, step.reach.to(device)
            )
            out = layer.finish(hidden, mixed[None])
            loss_sum, right = self._score(out[0], features.teacher, step.teacher.to(device))
            alive = alive & right
            loss = loss + self.decay**j * loss_sum
            counts = torch.stack((right.sum(), alive.sum(), alive.new_tensor(len(alive), dtype=torch.int64)))
            stats[0, j], stats[1:, j] = loss_sum.detach(), counts
            hidden = drafter.feedback(out)
        return loss, stats

    def _score(self, out: Tensor, teacher: Teacher, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss sum of out [S, H] and bool [S], true where the draft is the target's choice."""
        choice = teacher.choice[index]
        inside = (choice >= 0).nonzero().flatten()
        score = partial(soft_cross_entropy, probabilities=teacher.probabilities, index=index[inside])
        loss_sum, predicted = self.drafter.lm_head(self.drafter.norm(out[inside]), loss=score)
        right = torch.zeros(len(out), dtype=torch.bool, device=out.device)
        right[inside] = predicted == choice[inside]
        return loss_sum, right
