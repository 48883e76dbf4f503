"""Which reading of a public drafter is right: each is measured on a short text, for no format says it in one way."""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from drafters.chat import render_prompt
from drafters.errors import ContractError
from drafters.models.base import Drafter
from drafters.public.folder import PublicFolder
from drafters.target import Target

log = logging.getLogger(__name__)

# What a drafter is measured on: questions, and answers a model may give. Ours, so that nothing has to be fetched.
TEXTS = (
    (
        "What is the capital of France?",
        "The capital of France is Paris. It is the largest city in the country, and it lies on the river Seine. Paris "
        "is known for its museums, its food and its buildings, such as the Eiffel Tower and the Louvre.",
    ),
    (
        "Write a function that adds up a list of numbers.",
        "Here is a function in Python that adds up a list of numbers:\n\n```python\ndef add_up(numbers):\n"
        "    total = 0\n    for number in numbers:\n        total += number\n    return total\n```\n\nYou can call it "
        "like this: `add_up([1, 2, 3])`, which returns 6.",
    ),
    (
        "How do I make a cup of tea?",
        "To make a cup of tea, you will need a tea bag, water and a cup. First, boil the water. Then put the tea bag "
        "into the cup and pour the hot water over it. Let it steep for three to five minutes, and take the bag out.",
    ),
)
MAX_TOKENS = 100  # of one answer
SURE = 3.0  # standard errors by which a reading must be better than another
CHANCE = 3.0  # standard deviations above chance from which acceptance counts as more


@dataclass(frozen=True)
class Sample:
    """One text and what the target says about it. ids [1, T]; taps [1, T, S*Ht] of the S indices; law fp32 [R, V]: the
    target's distribution of each token of the answer, the one after it included; start: the answer's first token."""

    ids: torch.Tensor
    taps: torch.Tensor
    indices: tuple[int, ...]
    law: torch.Tensor
    start: int

    def of(self, taps: tuple[int, ...], width: int) -> torch.Tensor:
        """The states [1, T - 1, len(taps)*Ht] of some of the indices, the last position left out."""
        states = self.taps[:, :-1].view(1, self.ids.shape[1] - 1, len(self.indices), width)
        return states[:, :, [self.indices.index(tap) for tap in taps]].flatten(2)


@dataclass(frozen=True)
class Measured:
    """First drafts of a reading over the answers of TEXTS. hits bool [N]: was the draft the target's choice; overlap
    fp32 [N]: chance of acceptance at temperature 1, the sum over tokens of min(p, q), which tells readings apart that
    choose alike; chance: the share of hits to be expected of drafts that know nothing of the text."""

    hits: torch.Tensor
    overlap: torch.Tensor
    chance: float

    @property
    def positions(self) -> int:
        """How many drafts there were."""
        return len(self.hits)

    @property
    def accepted(self) -> int:
        """How many of them were the target's choice."""
        return int(self.hits.sum())

    @property
    def rate(self) -> float:
        """accepted / positions."""
        return self.accepted / self.positions

    @property
    def by_chance(self) -> bool:
        """Whether as many agreements are to be expected of drafts that know nothing of the text."""
        spread = math.sqrt(self.positions * self.chance * (1 - self.chance))
        return self.accepted <= self.positions * self.chance + CHANCE * spread + 1

    def beats(self, other: Measured) -> bool:
        """Whether it is better on the same text by more than luck: in hits, or in overlap and not worse in hits.

        A reading that accepts what chance would is never the better one.
        """
        if self.by_chance:
            return False
        hits, overlap = _lead(self.hits.float() - other.hits.float()), _lead(self.overlap - other.overlap)
        return hits > SURE or (overlap > SURE and hits > -SURE)


def _lead(differences: torch.Tensor) -> float:
    """Their mean in standard errors; 0 where all are 0."""
    error = float(differences.std()) / math.sqrt(len(differences))
    return float(differences.mean()) / error if error else 0.0


def tap_candidates(
    folder: PublicFolder, stated: Any, nested: Any, count: int, target: Target
) -> list[tuple[str, tuple[int, ...]]]:
    """What the ids in config.json may mean as `hidden_states` indices of the target, the likeliest first.

    stated: eagle_aux_hidden_state_layer_ids as vLLM and speculators read it, indices; nested: the one in eagle_config,
    which SGLang reads as outputs of layers counted from 0. Without ids, engines' defaults. Raises ContractError where
    no candidate is in the target's range.
    """
    depth = target.num_layers
    found: dict[tuple[int, ...], str] = {}

    def add(title: str, taps: list[int]) -> None:
        if len(taps) == count + 1:  # some also list the last layer, which the drafter does not read
            title, taps = f"{title}, the last left out", taps[:count]
        if len(taps) == count == len(set(taps)) and all(0 <= tap <= depth for tap in taps):
            found.setdefault(tuple(taps), title)

    for ids, key, shifts in ((stated, "", (0, 1)), (nested, "eagle_config.", (1, 0))):
        if ids is None:
            continue
        if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
            raise folder.wrong(f"config.json: {key}eagle_aux_hidden_state_layer_ids is {ids!r}", "Numbers are needed.")
        for shift in shifts:
            meaning = "layers counted from 0" if shift else "hidden_states"
            add(f"{key}eagle_aux_hidden_state_layer_ids {ids} as {meaning}", [each + shift for each in ids])
        if not found:
            raise ContractError(
                f"{folder.path}: config.json: {key}eagle_aux_hidden_state_layer_ids is {ids}, fc reads {count} of the "
                f"{depth + 1} hidden states of target {target.name!r}. Set target.path to the model that this drafter "
                "was made for."
            )
    usual = [2, depth // 2, depth - 3]
    add("the default", usual)
    for shift, words in ((-1, "one block earlier"), (1, "one block later")):
        add(f"the default, {words}", [tap + shift for tap in usual])
    add("a quarter, half and three quarters of the blocks", [depth // 4, depth // 2, 3 * depth // 4])
    if count == 1:
        add("the last state", [depth])
    if not found:
        raise folder.wrong(
            f"fc reads {count} hidden states, and config.json has no eagle_aux_hidden_state_layer_ids to say which",
            "Add them to config.json.",
        )
    return [(title, taps) for taps, title in found.items()]


def samples(target: Target, indices: tuple[int, ...]) -> list[Sample]:
    """TEXTS as the target reads them, with the `hidden_states` of these indices."""
    found = []
    for question, answer in TEXTS:
        ids, start = _encode(target, question, answer)
        text = torch.tensor([ids], device=target.device)
        length = text.shape[1]
        positions = torch.arange(length, device=target.device)[None]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=target.device).tril()
        taps, last = target.hidden(text, positions, mask, indices)
        found.append(Sample(text, taps, indices, target.logits(last[0, start - 1 :]).softmax(-1), start))
    return found


def _encode(target: Target, question: str, answer: str) -> tuple[list[int], int]:
    """Ids of a text, and where its answer begins."""
    tokenizer = target.tokenizer
    if tokenizer.chat_template is None:
        ids = list(tokenizer(f"{question}\n")["input_ids"])
    else:
        ids = render_prompt(tokenizer, [{"role": "user", "content": question}])
    start = len(ids)
    ids += tokenizer(answer, add_special_tokens=False)["input_ids"]
    return ids[: start + MAX_TOKENS], max(start, 2)  # the first draft is of token 2


@torch.no_grad()
def measure(drafter: Drafter, taps: tuple[int, ...], texts: list[Sample]) -> Measured:
    """Teacher-forced first drafts of a bound drafter that reads these hidden states."""
    hits, overlap, drafted, chosen = [], [], Counter(), Counter()
    ids = drafter.draft_to_target(torch.arange(drafter.shape.draft_vocab_size, device=drafter.d2t.device))
    for text in texts:
        length = text.ids.shape[1]
        positions = torch.arange(length - 1, device=text.ids.device)[None]
        states = text.of(taps, drafter.shape.target_hidden_size)
        # Row t drafts token t + 2.
        logits = drafter.first_logits(text.ids, states, positions)[0, text.start - 2 :].float()
        drafts, choices = ids[logits.argmax(-1)], text.law.argmax(-1)
        hits.append((drafts == choices).cpu())
        overlap.append(torch.minimum(logits.softmax(-1), text.law[:, ids]).sum(-1).cpu())
        drafted.update(drafts.tolist())
        chosen.update(choices.tolist())
    total = sum(drafted.values())
    chance = sum(count * chosen[token] for token, count in drafted.items()) / total**2
    return Measured(torch.cat(hits), torch.cat(overlap), chance)
