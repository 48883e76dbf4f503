"""Training-time test of EAGLE-3 (EAGLE: eagle/traineagle3/cnets.py) on packed rows, for every recurrent drafter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafters.config_drafter import Objective
from drafters.models.attention import block_diagonal_attention
from drafters.models.layout import Features, Layout, Step
from drafters.models.recurrent import RecurrentDrafter
from drafters.models.scoring import score


class TestTimeTraining(nn.Module):
    """The training graph around a drafter; its forward is what DeepSpeed wraps."""

    __test__ = False

    def __init__(self, drafter: RecurrentDrafter, decay: float, objective: Objective) -> None:
        super().__init__()
        self.drafter = drafter
        self.decay = decay
        self.objective = objective

    def entry(self, layout: Layout, features: Features) -> Tensor:
        """The layer's hidden input [A, H] at active positions."""
        return self.drafter.fuse(features.taps)

    def step_loss(self, j: int, step: Step, out: Tensor, features: Features) -> tuple[Tensor, Tensor]:
        """Loss sum of draft step j's layer outputs [S, H], and bool [S]: is the draft the target's choice."""
        read, index = self.drafter.before_head(out), step.teacher.to(out.device)
        return score(self.drafter.lm_head, read, features.teacher, index, self.objective)

    def forward(self, layout: Layout, features: Features) -> tuple[Tensor, Tensor]:
        """Return the decayed loss sum over all steps and the statistics that Drafter.training_graph describes."""
        drafter, layer = self.drafter, self.drafter.layer
        device = features.taps.device
        hidden = self.entry(layout, features)[None]
        joined, residual = layer.inputs(drafter.embed(layout.tokens.to(device))[None], hidden)
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
                joined, residual = joined[:, kept], residual[:, kept]
            else:
                joined, residual = layer.inputs(drafter.embed(step.tokens.to(device))[None], hidden)
                own_keys, own_values = layer.keys_values(joined, position_ids)
                diagonal.append((own_keys[0], own_values[0]))
            queries = layer.queries(joined, position_ids)[0]
            mixed = block_diagonal_attention(
                queries, keys[0], values[0], diagonal, step.segments, step.reach.to(device)
            )
            out = layer.finish(residual, mixed[None])
            loss_sum, right = self.step_loss(j, step, out[0], features)
            alive = alive & right
            loss = loss + self.decay**j * loss_sum
            counts = torch.stack((right.sum(), alive.sum(), alive.new_tensor(len(alive), dtype=torch.int64)))
            stats[0, j], stats[1:, j] = loss_sum.detach(), counts
            hidden = drafter.feedback(out)
        return loss, stats
