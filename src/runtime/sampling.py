"""What a request asks of the sampler, and the target's own choice under it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """One request's settings.

    max_new_tokens: most tokens to emit, prompt not counted. temperature: 0 is greedy. seed: keys all noise of the
    request. stop: texts that end the answer (not part of it). ignore_eos: end ids do not end the answer.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; set it to 1 or more.")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; set it to 0 (greedy) or a positive number.")
        if isinstance(self.stop, str):
            raise ValueError(f"stop is the text {self.stop!r}; set it to a tuple of texts, ({self.stop!r},).")
        if any(not text for text in self.stop):
            raise ValueError("stop holds an empty text, which would end every answer at once; remove it.")


def keyed_gumbel(seed: int, position: int, size: int) -> Tensor:
    """Gumbel noise [size] in fp64 that depends on (seed, absolute position) alone.

    The same on every batch, order and tree, so the text under a seed does not depend on what was drafted.
    """
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    uniform = torch.rand(size, generator=generator, dtype=torch.float64)
    return -torch.log(-torch.log(uniform.clamp_(1e-300, 1 - 1e-16)))


class Noise:
    """One request's Gumbel noise [V] by absolute position; computed once per position while it is needed."""

    def __init__(self, seed: int, size: int):
        self.seed, self.size = seed, size
        self._known: dict[int, Tensor] = {}

    def at(self, position: int) -> Tensor:
        """The noise with which the token at this position is chosen, fp64 [V]."""
        if position not in self._known:
            self._known[position] = keyed_gumbel(self.seed, position, self.size)
        return self._known[position]

    def forget(self, before: int) -> None:
        """Drops positions already decided."""
        self._known = {position: noise for position, noise in self._known.items() if position >= before}


@dataclass(frozen=True)
class DraftNoise:
    """What a proposer may know of the target's coming choices: temperature, and the noise by depth of the draft."""

    noise: Noise
    root: int  # absolute position of the tree's root
    temperature: float

    def at(self, depth: int) -> Tensor:
        """The noise of the token at this depth (1: the root's children), fp64 [V]."""
        return self.noise.at(self.root + depth)


def choose(logits: Tensor, positions: list[int], params: SamplingParams, noise: Noise | None = None) -> Tensor:
    """The target's own next token after each node, ids [N] (Gumbel-max; argmax at temperature 0).

    logits: [N, V]; positions: absolute position of the token being chosen, one per node; noise: the request's own,
    made from the seed where it is not given. Raises ValueError on a non-finite logit.
    """
    top = logits.amax(-1)
    if not torch.isfinite(top).all():
        bad = int((~torch.isfinite(top)).nonzero()[0])
        raise ValueError(f"the target's logits at position {positions[bad]} are not finite")
    if params.temperature == 0.0:
        return logits.argmax(-1)
    scores = torch.log_softmax(logits.double() / params.temperature, -1)
    noise = noise or Noise(params.seed, logits.shape[-1])
    return (scores + torch.stack([noise.at(p) for p in positions]).to(logits.device)).argmax(-1)
