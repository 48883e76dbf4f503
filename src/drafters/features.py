"""The target's side of a batch: computed on the spot, or once per document and kept in a store."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from drafters.artifacts import joined_folders
from drafters.batches import Batch, mask4d
from drafters.config import TrainRun
from drafters.corpus import ResponseRecord
from drafters.errors import ArtifactError
from drafters.losses import make_teacher
from drafters.models.base import Drafter
from drafters.models.layout import Features, Inputs, Layout
from drafters.store import FOLDER, FeatureStore, document_key, wider_stores
from drafters.target import DTYPES, Target, default_taps
from drafters.threads import side_by_side

log = logging.getLogger(__name__)

LOGIT_ELEMENTS = 1 << 23
AHEAD = 2  # batches per thread that are computed together: with few documents the last one is waited for


def target_choice(target: Target, last_hidden: Tensor) -> Tensor:
    """Return the target's argmax over its full vocabulary, int64 [R], of last_hidden [R, Ht]; in chunks of rows."""
    rows = max(1, LOGIT_ELEMENTS // target.vocab_size)
    parts = [target.logits(part).argmax(-1) for part in last_hidden.split(rows)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=last_hidden.device)


def shared_taps(target: Target, taps: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The hidden states that the families read unless told otherwise, and these: what a shared store keeps."""
    usual = (*default_taps(target.num_layers), target.num_layers)
    return tuple(sorted({*usual, *taps}))


class _Document(NamedTuple):
    """One text of a batch: ids int64 [T] and which of them are the answer, bool [T]."""

    key: str
    ids: Tensor
    answers: Tensor


def _documents(batch: Batch) -> list[_Document]:
    found = []
    for ids, answers, numbers in zip(batch.ids, batch.loss_mask, batch.document_ids):
        for number in range(int(numbers.max()) + 1):
            where = numbers == number
            found.append(_Document(document_key(ids[where], answers[where]), ids[where], answers[where]))
    return found


class FeatureSource(Protocol):
    """Turns a batch and its layout into what a training graph reads of them, on the training device."""

    def __call__(self, batch: Batch, layout: Layout, later: Iterable[Batch] = ()) -> Features | Inputs:
        """later: batches that are asked for next, in order."""

    def flush(self) -> None:
        """Put what is still in memory where a resumed run finds it."""


class _Teaching:
    """What both sources share: the target and the draft rows of its head."""

    def __init__(
        self, target: Target, taps: tuple[int, ...], t2d: Tensor, dtype: torch.dtype, greedy: bool = False
    ) -> None:
        """greedy: all answers are the target's own at temperature 0, so each of their tokens is its choice."""
        self.target, self.taps, self.greedy = target, taps, greedy
        t2d = t2d.to(target.device)
        self.head = target.head_weight.detach()[t2d].to(dtype)
        self.to_draft = torch.where(t2d, t2d.cumsum(0) - 1, -1)

    def _features(self, taps: Tensor, last_hidden: Tensor, choice: Tensor) -> Features:
        device = self.target.device
        teacher = make_teacher(last_hidden.to(device), self.head, choice.to(device), self.to_draft)
        return Features(taps.to(device), teacher)


class OnlineFeatures(_Teaching):
    """Runs the target on every packed row, every time; stores nothing."""

    def __call__(self, batch: Batch, layout: Layout, later: Iterable[Batch] = ()) -> Features:
        """Return the Features of a batch."""
        device = self.target.device
        mask = mask4d(batch.document_ids.to(device))
        taps, last = self.target.hidden(batch.ids.to(device), batch.position_ids.to(device), mask, self.taps)
        last = last.flatten(0, 1)[layout.teacher.to(device)]
        choice = batch.ids.flatten()[layout.teacher + 1] if self.greedy else target_choice(self.target, last)
        return self._features(taps.flatten(0, 1)[layout.active.to(device)], last, choice)

    def flush(self) -> None:
        """Nothing is kept."""


class BatchInputs:
    """Leaves the target to the training graph: what it runs it on, and nothing else."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, batch: Batch, layout: Layout, later: Iterable[Batch] = ()) -> Inputs:
        """Return the Inputs of a batch."""
        mask = mask4d(batch.document_ids.to(self.device))
        return Inputs(batch.ids.to(self.device), batch.position_ids.to(self.device), mask)

    def flush(self) -> None:
        """Nothing is kept."""


class CachedFeatures(_Teaching):
    """Runs the target once per document and keeps what it said in a FeatureStore.

    Each document is run by itself: what is computed depends on nothing else, and a CPU's threads take one each.
    Documents that were stored while the responses were collected are read from there.
    """

    def __init__(
        self,
        target: Target,
        taps: tuple[int, ...],
        t2d: Tensor,
        dtype: torch.dtype,
        folder: Path,
        rank: int = 0,
        collected: Sequence[Path] = (),
        keep: tuple[int, ...] | None = None,
        greedy: bool = False,
    ) -> None:
        """Open or make the store under `folder`; collected: folders of stores to read beside it, where they exist.

        keep: what a new store holds, for runs of other families to read as well; None: taps alone.
        """
        super().__init__(target, taps, t2d, dtype, greedy)
        self.store = FeatureStore(target, taps if keep is None else keep, folder, rank)
        others = [store for other in (folder, *collected) for store in wider_stores(target, taps, other, rank)]
        self.collected = [store for store in others if store.folder != self.store.folder]

    def reserve(self, tokens: int) -> None:
        """Say how large the store may become; raises ArtifactError when the disk cannot hold `tokens` tokens."""
        needed, free = tokens * self.store.bytes_per_token, self.store.free()
        present = sum(store.size() for store in (self.store, *self.collected))
        log.info(
            "feature store %s: %.2f GB present, up to %.2f GB in all", self.store.folder, present / 1e9, needed / 1e9
        )
        if needed - present > free:
            raise ArtifactError(
                f"the feature store {self.store.folder} may need {(needed - present) / 1e9:.2f} GB more, the disk has "
                f"{free / 1e9:.2f} GB free. Set trainer.features=online, fewer prompts, or another output_dir."
            )

    def __call__(self, batch: Batch, layout: Layout, later: Iterable[Batch] = ()) -> Features:
        """Return the Features of a batch, from the store where it has them.

        Where it lacks one it computes those of the batches that come later too: more documents than threads.
        """
        documents = _documents(batch)
        if self._missing(documents):
            ahead = islice(later, AHEAD * torch.get_num_threads())
            self._compute(self._missing([*documents, *chain.from_iterable(map(_documents, ahead))]))
        found = [self._stored(document.key) for document in documents]
        if not found:
            size = self.target.hidden_size
            empty = torch.empty(0, dtype=torch.int64)
            return self._features(torch.empty(0, len(self.taps) * size), torch.empty(0, size), empty)
        taps, last, choice = (torch.cat([entry[name] for entry in found]) for name in ("taps", "last", "choice"))
        return self._features(taps, last, choice)

    def _stores(self, key: str) -> Iterator[FeatureStore]:
        return (store for store in (self.store, *self.collected) if key in store)

    def _missing(self, documents: Iterable[_Document]) -> list[_Document]:
        """Those that no store holds, each once."""
        lacking = {document.key: document for document in documents if not any(self._stores(document.key))}
        return list(lacking.values())

    def _stored(self, key: str) -> dict[str, Tensor]:
        return next(self._stores(key)).get(key, self.taps)

    def _compute(self, documents: list[_Document]) -> None:
        documents = sorted(documents, key=lambda document: len(document.ids), reverse=True)  # the longest first
        alone = self.target.device.type != "cpu" or self.target.follows_length
        found = map(self._run, documents) if alone else side_by_side(self._run, documents)
        for document, tensors in zip(documents, found):
            self.store.put(document.key, *tensors)

    def _run(self, document: _Document) -> tuple[Tensor, Tensor, Tensor]:
        """A document's taps [T - 1, K*Ht]; of its answer the last states [A, Ht] and the target's choices [A]."""
        ids, answers = document.ids.to(self.target.device), document.answers.to(self.target.device)[1:]
        positions = torch.arange(len(ids), device=self.target.device)
        taps, last = self.target.hidden(ids[None], positions[None], None, self.store.taps)
        last = last[0, :-1][answers]
        choice = ids[1:][answers] if self.greedy else target_choice(self.target, last)
        return taps[0, :-1], last, choice

    def flush(self) -> None:
        """Write what is still in memory."""
        self.store.flush()


def feature_source(
    drafter: Drafter, target: Target, cfg: TrainRun, out_dir: Path, records: Sequence[ResponseRecord], rank: int
) -> FeatureSource:
    """What trainer.features and trainer.feature_store ask for, of a run in out_dir on these records."""
    if drafter.runs_target:
        return BatchInputs(target.device)
    taps, dtype = drafter.taps_for(cfg.drafter, target), DTYPES[cfg.trainer.dtype]
    greedy = all(record.temperature == 0.0 for record in records)
    if cfg.trainer.features == "online":
        return OnlineFeatures(target, taps, drafter.t2d, dtype, greedy)
    given, shared, length = cfg.data.responses, cfg.trainer.feature_store, cfg.trainer.row_length
    collected = [folder / FOLDER for folder in joined_folders(given)] if given else [out_dir / "responses" / FOLDER]
    folder = out_dir / FOLDER if shared is None else Path(shared).expanduser()
    keep = None if shared is None else shared_taps(target, taps)
    store = CachedFeatures(target, taps, drafter.t2d, dtype, folder, rank, collected, keep, greedy)
    store.reserve(sum(min(length, len(r.prompt_ids) + len(r.response_ids)) for r in records))
    return store
