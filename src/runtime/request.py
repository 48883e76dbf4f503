"""One request: what was asked, what has been emitted, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from runtime.metrics import Stats
from runtime.processors import Processors
from runtime.sampling import Noise, SamplingParams


@dataclass(frozen=True)
class Result:
    """A finished answer. finish_reason: "stop" (end id or stop text) or "length"."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stats: Stats


@dataclass
class Request:
    """A running request; tokens go through push() one at a time, the first hit ends it."""

    index: int
    prompt_ids: list[int]
    params: SamplingParams
    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    noise: Noise | None = None  # of a request that samples
    processors: Processors | None = None
    token_ids: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    finish_reason: str | None = None
    _stop_at: int | None = None  # where in the text a stop text begins

    @property
    def length(self) -> int:
        """Tokens committed: prompt and answer."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.params.max_new_tokens - len(self.token_ids)

    def push(self, token: int) -> bool:
        """Emits one token; True when it ends the request (end id, stop text, length, in this order)."""
        self.token_ids.append(token)
        if token in self.eos_ids and not self.params.ignore_eos:
            self.finish_reason = "stop"
        elif self.params.stop and self._find_stop():
            self.finish_reason = "stop"
        elif self.remaining <= 0:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def push_all(self, tokens: list[int]) -> int:
        """Emits tokens until one ends the request; returns how many were emitted."""
        for count, token in enumerate(tokens, start=1):
            if self.push(token):
                return count
        return len(tokens)

    @property
    def text(self) -> str:
        """The answer so far, special tokens left out, cut before a stop text."""
        return self._decode()[: self._stop_at]

    @property
    def safe_text(self) -> str:
        """The part of the text no later token can change: no partial character, no start of a stop text."""
        text = self.text
        if self.finish_reason is not None:
            return text
        text = text.rstrip("\ufffd")
        held = max((_overlap(text, stop) for stop in self.params.stop), default=0)
        return text[: len(text) - held]

    def result(self) -> Result:
        """The finished answer."""
        return Result(self.prompt_ids, self.token_ids, self.text, self.finish_reason, self.stats)

    def _decode(self) -> str:
        return self.tokenizer.decode(self.token_ids, skip_special_tokens=True)

    def _find_stop(self) -> bool:
        text = self._decode()
        found = [at for at in (text.find(stop) for stop in self.params.stop) if at >= 0]
        self._stop_at = min(found, default=None)
        return self._stop_at is not None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that begins stop."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
