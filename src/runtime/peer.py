"""transformers' own generate, measured beside the engine."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig

from drafters.errors import ConfigError
from drafters.target import Target
from runtime.sampling import SamplingParams


class TransformersPeer:
    """transformers' own generate on its own copy of the target, because the engine lays the target's weights out."""

    def __init__(self, target: Target):
        self.target = target
        self.model = target.own_model()
        # A model's own defaults (top_p, repetition penalty) would make it do other work than the engine.
        self.model.generation_config = GenerationConfig()
        pad = target.tokenizer.pad_token_id
        self.pad_id = pad if pad is not None else (*target.eos_ids, 0)[0]

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
        """Ids after each prompt up to its end id; one left-padded batch under the settings of the first.

        Raises ConfigError for a setting that transformers' generate does not have.
        """
        first, longest = params[0], max(map(len, prompts))
        ids = torch.tensor([[self.pad_id] * (longest - len(row)) + row for row in prompts])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
        config = GenerationConfig(
            max_new_tokens=first.max_new_tokens,
            **_settings(first),
            eos_token_id=list(self.target.eos_ids) or None,
            pad_token_id=self.pad_id,
        )
        device = self.target.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(first.seed)
            out = self.model.generate(ids.to(device), attention_mask=mask.to(device), generation_config=config)
        return [self._cut(row) for row in out[:, longest:].tolist()]

    def _cut(self, row: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(row) if token in self.target.eos_ids), len(row) - 1)
        return row[: end + 1]


def _settings(params: SamplingParams) -> dict[str, Any]:
    """The request's sampling as transformers names it, nothing left to its defaults."""
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(params, name):
            raise ConfigError(
                f"sampling.{name} is {getattr(params, name)}, which transformers' generate does not have. "
                "Set eval.compare_transformers=false."
            )
    found: dict[str, Any] = {"do_sample": bool(params.temperature), "repetition_penalty": params.repetition_penalty}
    if params.temperature:
        names = ("temperature", "top_k", "top_p", "min_p")
        found |= {name: getattr(params, name) for name in names}
    if params.min_tokens:
        found["min_new_tokens"] = params.min_tokens
    if params.bad_words:
        found["bad_words_ids"] = [list(word) for word in params.bad_words]
    if params.logit_bias:
        found["sequence_bias"] = {(token,): bias for token, bias in params.logit_bias}
    return found
