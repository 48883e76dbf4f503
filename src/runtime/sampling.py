"""What a request asks of the sampler, and the target's own choice under it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

VERIFICATIONS = ("coupled", "rejection", "typical")
# splitmix64's constants (Steele, Lea and Flood 2014) as signed 64-bit numbers, which is what torch multiplies.
_STEP, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


@dataclass(frozen=True)
class SamplingParams:
    """One request's settings; a field out of range raises ValueError.

    max_new_tokens: most tokens to emit, prompt not counted. temperature: 0 is greedy. seed: keys all noise of the
    request. stop: texts that end the answer (not part of it). ignore_eos: end ids do not end the answer. top_k (0
    off), top_p (1 off), min_p (0 off): transformers' warpers, after the temperature. repetition_penalty: over prompt
    and answer (1 off). presence_penalty, frequency_penalty: over the answer alone, as in OpenAI's API (0 off).
    logit_bias: added to the logits, id -> bias as a dict or pairs. min_tokens: no end id among the first so many.
    bad_words: id sequences never completed. verification: how drafts are accepted (see rules.decide); typical is lossy.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    verification: str = "coupled"

    def __post_init__(self) -> None:
        self._check_numbers()
        if isinstance(self.stop, str):
            raise ValueError(f"stop is the text {self.stop!r}; set it to a tuple of texts, ({self.stop!r},).")
        if any(not text for text in self.stop):
            raise ValueError("stop holds an empty text, which would end every answer at once; remove it.")
        if self.min_tokens > self.max_new_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens} but max_new_tokens is {self.max_new_tokens}; lower it.")
        if self.verification not in VERIFICATIONS:
            raise ValueError(f"verification is {self.verification!r}; set it to one of {', '.join(VERIFICATIONS)}.")
        # Kept as tuples, so that two requests that ask for the same are equal and hash alike.
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        object.__setattr__(self, "bad_words", _words(self.bad_words))

    def _check_numbers(self) -> None:
        for name, least in (("max_new_tokens", 1), ("top_k", 0), ("min_tokens", 0)):
            value = getattr(self, name)
            if not _whole(value) or value < least:
                raise ValueError(f"{name} is {value}; set it to a whole number, {least} or more.")
        infinity = float("inf")
        for name, fits, words in (
            ("temperature", 0.0 <= self.temperature < infinity, "0 (greedy) or a positive number"),
            ("top_p", 0.0 < self.top_p <= 1.0, "a number above 0 and up to 1 (off)"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "a number from 0 (off) to 1"),
            ("repetition_penalty", 0.0 < self.repetition_penalty < infinity, "a positive number (1 is off)"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "a number from -2 to 2 (0 is off)"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "a number from -2 to 2 (0 is off)"),
        ):
            if not fits:
                raise ValueError(f"{name} is {getattr(self, name)}; set it to {words}.")

    def check_vocabulary(self, size: int) -> None:
        """Raises ValueError when logit_bias or bad_words names an id the target, of `size` ids, does not have."""
        asked = [("logit_bias", token) for token, _ in self.logit_bias]
        asked += [("bad_words", token) for word in self.bad_words for token in word]
        for name, token in asked:
            if token >= size:
                raise ValueError(f"{name} holds id {token} but the target has {size} ids; use ids below {size}.")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bias_pairs(bias: dict[int, float] | tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    """(id, bias) pairs by id; biases may be as large as OpenAI's API lets them, +-100."""
    pairs = sorted(bias.items() if isinstance(bias, dict) else (tuple(pair) for pair in bias))
    for token, value in pairs:
        if not _whole(token) or token < 0:
            raise ValueError(f"logit_bias holds the id {token!r}; use token ids, whole numbers from 0.")
        if not -100.0 <= value <= 100.0:
            raise ValueError(f"logit_bias of id {token} is {value}; set it to a number from -100 to 100.")
    if len({token for token, _ in pairs}) < len(pairs):
        raise ValueError(f"logit_bias names an id twice: {pairs}; name each once.")
    return tuple((token, float(value)) for token, value in pairs)


def _words(words: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    words = tuple(tuple(word) if isinstance(word, (list, tuple)) else word for word in words)
    for word in words:
        if not isinstance(word, tuple) or not word or not all(_whole(token) and token >= 0 for token in word):
            raise ValueError(f"bad_words holds {word!r}; use sequences of at least one token id, ((5, 9), (12,)).")
    return words


def keyed(*parts: object) -> int:
    """A signed 64-bit key of the parts: equal parts give equal keys on every machine."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def keyed_gumbel(
    seed: int, position: int, size: int, device: torch.device | str = "cpu", salt: tuple[object, ...] = ()
) -> Tensor:
    """Gumbel noise [size] in fp64 that depends on (salt, seed, absolute position) alone.

    The same on every batch, order and tree, so the text under a seed does not depend on what was drafted. Entry i is
    splitmix64's i-th number under the position's key: integers alone, hence the same bits on CPU and GPU.
    """
    bits = torch.arange(1, size + 1, device=device).mul_(_STEP).add_(keyed(*salt, seed, position))
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, None)):
        bits ^= (bits >> shift) & ((1 << 64 - shift) - 1)  # torch's >> keeps the sign: clear the bits it smears
        if factor is not None:
            bits *= factor
    # 52 bits and a half: never 0, and never rounded up to 1.
    uniform = ((bits >> 12) & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


class Noise:
    """One request's Gumbel noise [V] by absolute position; computed once per position while it is needed.

    salt: makes another noise of the same seed, for anything that must not see the target's own.
    """

    def __init__(self, seed: int, size: int, device: torch.device | str = "cpu", salt: tuple[object, ...] = ()):
        self.seed, self.size, self.device, self.salt = seed, size, device, salt
        self._known: dict[int, Tensor] = {}

    def at(self, position: int) -> Tensor:
        """The noise with which the token at this position is chosen, fp64 [V] on the noise's device."""
        if position not in self._known:
            self._known[position] = keyed_gumbel(self.seed, position, self.size, self.device, self.salt)
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


def drawing_noise(
    seed: int, size: int, root: int, temperature: float, device: torch.device | str = "cpu"
) -> DraftNoise:
    """The noise a tree at this root is drawn with for the rejection rule; independent of every other noise.

    Keyed by the root too: block verification looks at drafts it then gives up, so drawing the same positions again
    with the same noise in the next round would bias the text.
    """
    return DraftNoise(Noise(seed, size, device, salt=("draw", root)), root, temperature)


def require_choice(logits: Tensor, positions: list[int]) -> None:
    """Raises ValueError where a row of [N, V] is not finite or leaves no token; positions name the rows."""
    top = logits.amax(-1)
    if torch.isfinite(top).all():
        return
    row = int((~torch.isfinite(top)).nonzero()[0])
    if float(top[row]) == -float("inf"):
        raise ValueError(
            f"no token is left at position {positions[row]}: logit_bias, bad_words and min_tokens rule out all of them"
        )
    raise ValueError(f"the target's logits at position {positions[row]} are not finite")


def choose(logits: Tensor, positions: list[int], params: SamplingParams, noise: Noise | None = None) -> Tensor:
    """The target's own next token after each node, ids [N] (Gumbel-max; argmax at temperature 0).

    logits: [N, V], processed but not divided by the temperature, which happens here; positions: absolute position of
    the token being chosen, one per node; noise: the request's own, made from the seed where it is not given. Raises
    ValueError on a row that is not finite or leaves no token.
    """
    require_choice(logits, positions)
    if params.temperature == 0.0:
        return logits.argmax(-1)
    noise = noise or Noise(params.seed, logits.shape[-1], logits.device)
    # Not normalised: a constant does not move the argmax.
    scores = logits.to(torch.float64, copy=True).div_(params.temperature)
    for row, position in zip(scores, positions):
        row += noise.at(position).to(row.device)
    return scores.argmax(-1)
