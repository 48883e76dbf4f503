"""A drop-in for transformers: model.generate(..., custom_generate=outrider_generate(drafter=...))."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import logits_process as processing
from transformers.generation import stopping_criteria as stopping
from transformers.generation.utils import GenerateDecoderOnlyOutput

from drafters.adapter import share
from drafters.config import TargetConfig
from drafters.errors import ConfigError
from drafters.target import Target
from drafters.target_sources import resolve
from runtime.engine import Engine
from runtime.loading import load_engine
from runtime.sampling import SamplingParams

# Fields of a GenerationConfig that are done as asked; generate() turns most into processors and criteria.
HONOURED = {
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "stop_strings", "do_sample", "temperature"),
    *("top_k", "top_p", "min_p", "repetition_penalty", "bad_words_ids", "sequence_bias", "num_return_sequences"),
    *("pad_token_id", "eos_token_id", "return_dict_in_generate"),
}
# Fields that change nothing in decoding by one decoder-only model.
SILENT = {"bos_token_id", "decoder_start_token_id", "transformers_version"}
# What generate() hands over beside the settings; anything else would go to the model's forward.
INPUTS = {"attention_mask", "position_ids", "use_cache", "cache", "logits_to_keep"}


def outrider_generate(
    drafter: object = None, tokenizer: PreTrainedTokenizerBase | None = None, **settings: int
) -> Callable[..., Tensor | GenerateDecoderOnlyOutput]:
    """A decoding loop for model.generate(custom_generate=...): the same tokens as generate's own, sooner.

    drafter, settings: as in Engine.load; tokenizer: the model's own, by default loaded from where the model came
    from. Greedy text equals generate's (fp32); sampled text follows the same distribution with noise keyed by a seed
    from torch's global generator, so torch.manual_seed repeats it whatever the drafter. The model itself stays as it
    is: the loop runs on a copy that shares its tensors, made anew when they change (on a CPU with weights laid out
    once more). A drafter that brings an adapter tunes that copy: the text is the tuned model's, and the log says so.
    What it cannot do raises ConfigError by name. generate() itself (transformers 5.24) keeps streamer=
    and tokenizer= from a callable: a streamer hears the prompt alone, and stop strings come as
    stopping_criteria=[StopStringCriteria(tokenizer, [...])]; they are looked for in the answer, not in the prompt.
    """
    return _Loop(drafter, tokenizer, settings)


class _Loop:
    def __init__(self, drafter: object, tokenizer: PreTrainedTokenizerBase | None, settings: dict[str, int]):
        self.drafter, self.tokenizer, self.settings = drafter, tokenizer, settings
        self._engine: Engine | None = None
        self._model: Callable[[], PreTrainedModel | None] = lambda: None
        self._state: list[tuple[int, int]] = []

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: processing.LogitsProcessorList,
        stopping_criteria: stopping.StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: object = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Called by generate(); input_ids [B, T], left-padded; returns what generate() returns."""
        if streamer is not None:
            raise _refusal("streamer", "use Engine.stream for text as it comes")
        if synced_gpus:
            raise _refusal("synced_gpus=True", "set synced_gpus=False")
        _check_config(generation_config)
        prompts = _prompts(input_ids, model_kwargs)
        limit, ends, stop = _read_criteria(stopping_criteria, input_ids.shape[1])
        asked = _read_processors(logits_processor, generation_config, input_ids.shape[1], limit)
        seeds = torch.randint(2**62, (len(prompts),)).tolist() if generation_config.do_sample else [0] * len(prompts)
        params = [SamplingParams(max_new_tokens=limit, seed=seed, stop=stop, **asked) for seed in seeds]
        engine = self._for_model(model, tokenizer)
        engine.target.eos_ids = ends
        answers = [result.token_ids for result in engine.generate(prompts, params)]
        sequences = _joined(input_ids, answers, generation_config, ends)
        return GenerateDecoderOnlyOutput(sequences) if generation_config.return_dict_in_generate else sequences

    def _for_model(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Engine:
        """The engine for a model, made anew when the model or a tensor of it is another than before."""
        state = [(tensor.data_ptr(), tensor._version) for tensor in _tensors(model)]
        if self._model() is not model or self._state != state:
            self._engine = None  # frees the old copy first
            self._engine = load_engine(self._target(model, tokenizer), self.drafter, **self.settings)
            self._model, self._state = weakref.ref(model), state
        return self._engine

    def _target(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Target:
        source = model.name_or_path
        known = self.tokenizer or tokenizer
        if known is None and not source:
            raise _refusal("a model made in memory without a tokenizer", "pass tokenizer= to outrider_generate")
        config = TargetConfig(name=Path(source).name or "model", path=source or None)
        folder = resolve(config) if source else Path()
        target = Target(share(model), known or AutoTokenizer.from_pretrained(folder), config, folder)
        target.check_head()
        return target


def _tensors(model: PreTrainedModel) -> itertools.chain[Tensor]:
    return itertools.chain(model.parameters(), model.buffers())


def _refusal(what: str, way_out: str) -> ConfigError:
    return ConfigError(f"custom_generate: {what} is not possible with outrider_generate; {way_out}.")


def _check_config(config: GenerationConfig) -> None:
    """Closed: a field not known to be done as asked has to be at its default."""
    usual = config._get_default_generation_params()
    for name, value in vars(config).items():
        if name.startswith("_") or name in HONOURED or name in SILENT:
            continue
        if value is not None and value != (usual.get(name) or False):  # off is None or False
            raise _refusal(f"generation_config.{name}={value!r}", f"set {name}={usual.get(name)!r}")


def _prompts(input_ids: Tensor, given: dict[str, Any]) -> list[list[int]]:
    """Each row's ids without its left padding."""
    strange = sorted(name for name, value in given.items() if value is not None and name not in INPUTS)
    if strange:
        raise _refusal(strange[0], "give input_ids and attention_mask alone")
    if given.get("use_cache") is False:
        raise _refusal("use_cache=False", "set use_cache=True")
    cache = given.get("cache")
    if cache is not None and cache.get_seq_length():
        raise _refusal(f"a cache that holds {cache.get_seq_length()} tokens", "give the whole prompt and no cache")
    mask = given.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    if not bool((mask.diff(dim=1) >= 0).all()) or not bool(mask[:, -1].all()):
        raise _refusal("an attention_mask with gaps or padding on the right", "pad on the left")
    positions = given.get("position_ids")
    usual = (mask.cumsum(-1) - 1).clamp(min=0)
    if positions is not None and not bool((((positions - usual) * mask) == 0).all()):
        raise _refusal("position_ids other than 0, 1, 2, ...", "leave position_ids out")
    return [row[kept.bool()].tolist() for row, kept in zip(input_ids, mask)]


def _read_criteria(
    criteria: stopping.StoppingCriteriaList, prompt_length: int
) -> tuple[int, tuple[int, ...], tuple[str, ...]]:
    """Most new tokens, end ids and stop texts."""
    limits, ends, stop = [], set(), []
    for criterion in criteria:
        if type(criterion) is stopping.MaxLengthCriteria:
            limits.append(criterion.max_length - prompt_length)
        elif type(criterion) is stopping.EosTokenCriteria:
            ends.update(criterion.eos_token_id.flatten().tolist())
        elif type(criterion) is stopping.StopStringCriteria:
            stop += criterion.stop_strings
        else:
            raise _refusal(f"the stopping criterion {type(criterion).__name__}", "leave it out")
    if not limits:
        raise _refusal("an answer without a limit", "set max_new_tokens")
    return min(limits), tuple(sorted(ends)), tuple(stop)


def _read_processors(
    processors: processing.LogitsProcessorList, config: GenerationConfig, prompt_length: int, limit: int
) -> dict[str, Any]:
    """SamplingParams' fields from what generate() built; read from the processors, so none is overlooked."""
    least = 0
    asked: dict[str, Any] = {"temperature": 1.0 if config.do_sample else 0.0}
    kinds = [type(processor) for processor in processors]
    doubled = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    if doubled is not None:
        raise _refusal(f"{doubled.__name__} twice", "leave one out")
    for processor in processors:
        kind = type(processor)
        if kind is processing.RepetitionPenaltyLogitsProcessor:
            asked["repetition_penalty"] = processor.penalty
        elif kind is processing.NoBadWordsLogitsProcessor:
            asked["bad_words"] = tuple(processor.sequence_bias)
        elif kind is processing.SequenceBiasLogitsProcessor and all(len(ids) == 1 for ids in processor.sequence_bias):
            asked["logit_bias"] = tuple((ids[0], bias) for ids, bias in processor.sequence_bias.items())
        elif kind is processing.MinLengthLogitsProcessor:
            least = max(least, processor.min_length - prompt_length)
        elif kind is processing.MinNewTokensLengthLogitsProcessor:
            least = max(least, processor.min_new_tokens)
        elif kind in WARPERS and config.do_sample:
            field = WARPERS[kind]
            asked[field] = getattr(processor, field)
        else:
            raise _refusal(f"the logits processor {kind.__name__}, as it is set,", "leave it out")
    return {**asked, "min_tokens": min(least, limit)}


WARPERS = {
    processing.TemperatureLogitsWarper: "temperature",
    processing.TopKLogitsWarper: "top_k",
    processing.TopPLogitsWarper: "top_p",
    processing.MinPLogitsWarper: "min_p",
}


def _joined(input_ids: Tensor, answers: list[list[int]], config: GenerationConfig, ends: tuple[int, ...]) -> Tensor:
    """Prompts and answers [B, T + longest], shorter answers padded as generate() pads them."""
    longest = max(map(len, answers))
    pad = config.pad_token_id if config.pad_token_id is not None else (ends or (None,))[0]
    if pad is None and min(map(len, answers)) < longest:
        raise _refusal("answers of different lengths without a padding token", "set pad_token_id")
    rows = [answer + [pad] * (longest - len(answer)) for answer in answers]
    return torch.cat([input_ids, torch.tensor(rows, device=input_ids.device, dtype=input_ids.dtype)], 1)
