"""The engine as collecting wants it: answers to rows of prompt ids, their hidden states kept where asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from drafters.config import DataConfig
from drafters.features import target_choice
from drafters.generation import Generate
from drafters.store import FeatureStore, document_key
from drafters.target import Target
from runtime.engine import Engine
from runtime.proposers.recorder import Recorder
from runtime.sampling import SamplingParams


def generator(engine: Engine, temperature: float, max_new_tokens: int) -> Generate:
    """The engine as collecting wants it: (prompt ids, seed) rows in, (row, response ids, finish reason) out."""

    def generate(rows: Sequence[tuple[list[int], int]]) -> Iterator[tuple[int, list[int], str]]:
        params = [SamplingParams(max_new_tokens, temperature, seed) for _, seed in rows]
        for index, result in engine.complete([ids for ids, _ in rows], params):
            yield index, list(result.token_ids), result.finish_reason

    return generate


def recording(target: Target, store: FeatureStore, data: DataConfig) -> Generate:
    """A generator that puts each answer's hidden states into the store, before the answer is recorded."""
    recorder = Recorder(store.taps)
    answers = generator(
        Engine.load(target, recorder, batch_size=data.batch_size), data.temperature, data.max_new_tokens
    )

    def generate(rows: Sequence[tuple[list[int], int]]) -> Iterator[tuple[int, list[int], str]]:
        for index, response, reason in answers(rows):
            ids = torch.tensor(rows[index][0] + response)
            states = recorder.take(ids.tolist())
            if states is not None:
                last = states[-len(response) :, -target.hidden_size :]  # the last tap is the target's last state
                asked = torch.arange(len(ids)) >= len(ids) - len(response)
                greedy = data.temperature == 0.0  # then the answer is what the target chose
                choice = torch.tensor(response) if greedy else target_choice(target, last)
                store.put(document_key(ids, asked), states, last, choice)
            yield index, response, reason

    return generate
