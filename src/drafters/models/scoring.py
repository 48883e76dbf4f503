"""One draft step's loss and hits, for every family."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from drafters.config_drafter import Objective
from drafters.losses import Teacher, distillation_loss
from drafters.models.layers import DraftHead


def score(
    head: DraftHead, hidden: Tensor, teacher: Teacher, index: Tensor, objective: Objective
) -> tuple[Tensor, Tensor]:
    """Loss sum of hidden [S, H] read by `head` against teacher rows `index` [S]; bool [S]: is it the target's choice.

    Positions whose choice lies outside the draft vocabulary have no loss and are misses (EAGLE-3's rule).
    """
    choice = teacher.choice[index]
    inside = (choice >= 0).nonzero().flatten()
    loss = partial(
        distillation_loss, probabilities=teacher.probabilities, index=index[inside], objective=objective
    )
    loss_sum, predicted = head(hidden[inside], loss=loss)
    right = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
    right[inside] = predicted == choice[inside]
    return loss_sum, right
