"""Penalties, bias, bad words, minimum length, top-k, top-p and min-p at every node of a tree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from runtime.sampling import SamplingParams
from runtime.tree import DraftTree


class CountPenaltyLogitsProcessor(LogitsProcessor):
    """OpenAI's presence and frequency penalties, over the tokens after the prompt; transformers has none.

    logit - presence * (count > 0) - frequency * count, count being how often the answer holds the token so far.
    """

    def __init__(self, prompt_length: int, presence: float, frequency: float):
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0).to(scores.dtype)


class Processors:
    """One request's processors, pure functions of a node's logits and its own history.

    The order is transformers' (_get_logits_processor, 5.24): bias, repetition penalty, bad words, minimum length,
    presence and frequency, then temperature, top-k, top-p, min-p. The last three see logits divided by the
    temperature, as in transformers, but what comes out is not divided: sampling.choose and rules.decide do that, once,
    whether a request has processors or not. At temperature 0 they are left out, since they never move the argmax.
    """

    def __init__(self, by_history: LogitsProcessorList, warpers: LogitsProcessorList):
        self._by_history = by_history
        self._warpers = warpers

    @classmethod
    def build(
        cls,
        params: SamplingParams,
        prompt_length: int,
        eos_ids: tuple[int, ...],
        device: torch.device | str = "cpu",
    ) -> Processors | None:
        """The processors a request needs, None when it needs none; device: where the logits will be."""
        by_history = _by_history(params, prompt_length, eos_ids, device)
        warpers = _warpers(params) if params.temperature else LogitsProcessorList()
        return cls(by_history, warpers) if by_history or warpers else None

    def apply(self, logits: Tensor, tree: DraftTree, ids: Sequence[int], nodes: Sequence[int] | None = None) -> Tensor:
        """Processed logits of the nodes (None: of all, in order), [len(nodes), V]; the logits stay as they are.

        logits: [N, V], the target's own at every node; ids: prompt and emitted tokens, the last being the tree's root.
        Each node sees ids and its own path. Raises ValueError when ids do not end at the root.
        """
        if ids[-1] != tree.tokens[0]:
            raise ValueError(f"the text ends in token {ids[-1]} but the tree's root is {tree.tokens[0]}")
        nodes = range(len(tree)) if nodes is None else nodes
        out = logits[list(nodes)]
        if self._by_history:
            text = torch.tensor(ids, device=logits.device)
            levels: dict[int, list[int]] = defaultdict(list)
            for index, node in enumerate(nodes):
                levels[tree.depths[node]].append(index)
            for level in levels.values():  # histories of one depth are equally long: one call for all of them
                drafted = [[tree.tokens[node] for node in tree.path(nodes[index])[1:]] for index in level]
                paths = torch.tensor(drafted, device=text.device).long()
                history = torch.cat([text.expand(len(level), -1), paths], 1)
                out[level] = self._by_history(history, out[level])
        if self._warpers:
            out = out.masked_fill(self._warpers(None, out).isneginf(), -float("inf"))
        return out


def _by_history(
    params: SamplingParams, prompt_length: int, eos_ids: tuple[int, ...], device: torch.device | str
) -> LogitsProcessorList:
    found = LogitsProcessorList()
    if params.logit_bias:
        found.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias}))
    if params.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.bad_words:
        # Without eos ids, which transformers would take out of the list unasked.
        found.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if params.min_tokens and eos_ids:
        found.append(
            MinNewTokensLengthLogitsProcessor(prompt_length, params.min_tokens, list(eos_ids), device=str(device))
        )
    if params.presence_penalty or params.frequency_penalty:
        found.append(CountPenaltyLogitsProcessor(prompt_length, params.presence_penalty, params.frequency_penalty))
    return found


def _warpers(params: SamplingParams) -> LogitsProcessorList:
    found = LogitsProcessorList()
    if params.top_k:
        found.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        found.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        found.append(MinPLogitsWarper(params.min_p))
    if found and params.temperature != 1.0:
        found.insert(0, TemperatureLogitsWarper(float(params.temperature)))
    return found
