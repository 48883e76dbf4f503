"""A stand-in target and generator for the tests of collecting: no model, a real tokenizer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from drafters.config import BuiltinData
from drafters.corpus import Prompt

HASHES = {
    "target": "stub",
    "target_config_sha256": "c0",
    "target_weights_sha256": "w0",
    "tokenizer_sha256": "t0",
    "chat_template_sha256": "m0",
}


@dataclass
class StubTarget:
    """What collecting reads of a Target; the tokenizer is real."""

    tokenizer: object
    fingerprint: dict[str, str] = field(default_factory=lambda: dict(HASHES))
    name: str = "stub"
    vocab_size: int = 512
    eos_ids: tuple[int, ...] = (2,)


PROMPTS = [Prompt(f"p{i}", "chat", ({"role": "user", "content": f"say {i}"},)) for i in range(6)]
CONFIG = BuiltinData(max_new_tokens=8)


def answer(prompt_ids: Sequence[int], seed: int) -> list[int]:
    """A deterministic stand-in for the model: depends on the prompt and the seed only."""
    return [(sum(prompt_ids) + seed + k) % 500 + 3 for k in range(1 + seed % 7)]


def reason(seed: int) -> str:
    return ("stop", "length")[seed % 2]


class Generator:
    """Answers rows last to first, so that completion order is not prompt order; keeps what it was asked."""

    def __init__(self, stop_after: int | None = None, kill: bool = False) -> None:
        self.asked: list[tuple[list[int], int]] = []
        self.stop_after, self.kill = stop_after, kill

    def __call__(self, rows: Sequence[tuple[list[int], int]]) -> Iterator[tuple[int, list[int], str]]:
        self.asked = list(rows)
        for count, index in enumerate(reversed(range(len(rows)))):
            if count == self.stop_after:
                if self.kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise KeyboardInterrupt
            yield index, answer(*rows[index]), reason(rows[index][1])
