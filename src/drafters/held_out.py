"""Records that were not trained on, as a drafter is trained on them: for what is measured once it is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drafters.batches import collate, pack
from drafters.config import TrainRun
from drafters.corpus import ResponseRecord
from drafters.features import OnlineFeatures
from drafters.models.base import Drafter
from drafters.models.layout import Features, Layout
from drafters.schedule import hold_out
from drafters.target import DTYPES, Target


def held_out_batches(
    drafter: Drafter, target: Target, records: Sequence[ResponseRecord], cfg: TrainRun
) -> Iterator[tuple[Layout, Features]]:
    """The held-out records in packed rows at full depth, the target run on the spot; none where none are held out."""
    held = hold_out(records)[1]
    if not held:
        return
    features = OnlineFeatures(target, drafter.taps_for(cfg.drafter, target), drafter.t2d, DTYPES[cfg.trainer.dtype])
    length = cfg.trainer.row_length
    for row in pack(held, length, seed=0, epoch=0):
        batch = collate(held, [row], length)
        layout = drafter.layout(batch, cfg.drafter.steps)
        yield layout, features(batch, layout)
