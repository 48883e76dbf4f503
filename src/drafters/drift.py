"""How far an adapter takes a target from its own distribution: drift.json in the export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from drafters.batches import collate, fit, mask4d
from drafters.corpus import ResponseRecord
from drafters.losses import self_distillation
from drafters.target import Target

DRIFT_NAME = "drift.json"


@torch.no_grad()
def measure_drift(
    original: Target, tuned: Target, records: Sequence[ResponseRecord], row_length: int
) -> dict[str, Any]:
    """KL(original || tuned) in nats per response token, and the share of these where both choose the same token.

    records: held out of training, cut to row_length; without any, both figures are None. Sums over sums.
    """
    device = original.device
    total, agreed, positions, usable = 0.0, 0, 0, fit(records, row_length).usable if records else ()
    for index in usable:
        length = min(row_length, len(records[index].prompt_ids) + len(records[index].response_ids))
        batch = collate(records, [(index,)], length)
        ids, places = batch.ids.to(device), batch.position_ids.to(device)
        mask = mask4d(batch.document_ids.to(device))
        told = batch.loss_mask[0, 1:].to(device)
        hidden = [target.hidden(ids, places, mask, ())[1][0, :-1][told] for target in (tuned, original)]
        kl, _, same = self_distillation(*hidden, original.head_weight)
        total, agreed, positions = total + float(kl), agreed + int(same), positions + len(hidden[0])
    return {
        "records": len(usable),
        "positions": positions,
        "kl": total / positions if positions else None,
        "top1_agreement": agreed / positions if positions else None,
    }
