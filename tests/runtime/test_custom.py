"""The drop-in gives generate's own tokens, leaves the model alone, and refuses by name what it cannot do."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, LogitsProcessorList, TextStreamer
from transformers.generation import MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation.logits_process import LogitsProcessor, TemperatureLogitsWarper

from drafters.errors import ConfigError
from runtime.custom import HONOURED, SILENT, _check_config, outrider_generate
from tests.runtime.conftest import RandomTrees


@pytest.fixture(scope="module")
def model(tiny_target):
    model = AutoModelForCausalLM.from_pretrained(tiny_target.folder, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=1)
    return model


@pytest.fixture(scope="module")
def loops(tiny_target, random_drafter):
    shared = {"tokenizer": tiny_target.tokenizer, "batch_size": 2}
    return {
        "none": outrider_generate(**shared),
        "ngram": outrider_generate("ngram", **shared),
        "random": outrider_generate(RandomTrees(512), **shared),
        "eagle3": outrider_generate((random_drafter, (2, 4, 5)), **shared),
    }


def batch():
    """Three prompts of 5, 9 and 2 ids, padded on the left."""
    torch.manual_seed(0)
    ids, mask = torch.randint(3, 512, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    for row, length in enumerate((5, 9, 2)):
        ids[row, : 9 - length], mask[row, : 9 - length] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


SETTINGS = {
    "plain": {"max_new_tokens": 24},
    "max_length": {"max_length": 21},
    "another end id": {"max_new_tokens": 24, "eos_token_id": [17, 60, 200, 300, 400]},
    "no end id": {"max_new_tokens": 12, "eos_token_id": None},
    "repetition penalty": {"max_new_tokens": 24, "repetition_penalty": 1.7},
    "bad words": {"max_new_tokens": 24, "bad_words_ids": [[i] for i in range(40, 400, 3)] + [[500, 501], [1]]},
    "bias": {"max_new_tokens": 24, "sequence_bias": [[[7], 3.0], [[9], -5.0]]},
    "min_new_tokens": {"max_new_tokens": 24, "min_new_tokens": 9, "eos_token_id": list(range(100, 300))},
    "min_length": {"max_new_tokens": 24, "min_length": 15, "eos_token_id": list(range(100, 300))},
    "several per prompt": {"max_new_tokens": 9, "do_sample": True, "top_k": 1, "num_return_sequences": 2},
    "sampling from one": {"max_new_tokens": 24, "do_sample": True, "top_k": 1},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("drafter", ["none", "random"])
def test_the_tokens_are_generates_own(model, loops, name, drafter):
    expected = model.generate(**batch(), **SETTINGS[name])
    assert torch.equal(model.generate(**batch(), **SETTINGS[name], custom_generate=loops[drafter]), expected)


@pytest.mark.parametrize("drafter", ["ngram", "eagle3"])
def test_every_drafter_gives_them(model, loops, drafter):
    expected = model.generate(**batch(), max_new_tokens=24)
    assert torch.equal(model.generate(**batch(), max_new_tokens=24, custom_generate=loops[drafter]), expected)


def test_stop_strings_and_a_single_prompt_without_a_mask(model, loops, tiny_target):
    ids, tokenizer = batch()["input_ids"][1:2], tiny_target.tokenizer
    tokens = model.generate(ids, max_new_tokens=24)[0, 9:].tolist()
    at = next(i for i in range(5, 24) if tokenizer.decode(tokens[i : i + 1]).isalnum())
    stop = StoppingCriteriaList([StopStringCriteria(tokenizer, [tokenizer.decode(tokens[at : at + 1])])])
    expected = model.generate(ids, max_new_tokens=24, stopping_criteria=stop)
    assert expected.shape[1] < 33
    found = model.generate(ids, max_new_tokens=24, stopping_criteria=stop, custom_generate=loops["random"])
    assert torch.equal(found, expected)


def test_a_dict_is_returned_where_it_is_asked_for(model, loops):
    out = model.generate(**batch(), max_new_tokens=5, return_dict_in_generate=True, custom_generate=loops["none"])
    assert torch.equal(out.sequences, model.generate(**batch(), max_new_tokens=5))


SAMPLED = {"max_new_tokens": 16, "do_sample": True, "temperature": 1.3, "top_p": 0.9, "min_p": 0.001, "top_k": 200}


def test_torchs_seed_repeats_sampled_text_whatever_the_drafter(model, loops):
    def sample(drafter, seed):
        torch.manual_seed(seed)
        inputs = batch()
        torch.manual_seed(seed)
        return model.generate(**inputs, **SAMPLED, custom_generate=loops[drafter])

    first = sample("none", 5)
    assert torch.equal(sample("random", 5), first)
    assert torch.equal(sample("eagle3", 5), first)
    assert not torch.equal(sample("none", 6), first)


def test_rows_of_one_prompt_are_sampled_apart(model, loops):
    ids = batch()["input_ids"][1:2]
    rows = model.generate(ids, **SAMPLED, num_return_sequences=4, custom_generate=loops["none"])
    assert len({tuple(row) for row in rows.tolist()}) == 4


def test_settings_of_the_sampler_reach_it(model, loops, monkeypatch):
    seen = []
    model.generate(**batch(), max_new_tokens=2, custom_generate=loops["none"])
    engine = loops["none"]._engine
    monkeypatch.setattr(engine, "generate", lambda prompts, params: seen.extend(params) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.generate(**batch(), **SAMPLED, repetition_penalty=1.1, custom_generate=loops["none"])
    assert {(p.temperature, p.top_p, p.min_p, p.top_k, p.repetition_penalty) for p in seen} == {
        (1.3, 0.9, 0.001, 200, 1.1)
    }


def test_the_model_itself_stays_as_it_is(model, tiny_target):
    kinds = [type(module) for module in model.modules()]
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    settings = copy.deepcopy(model.generation_config.to_dict())
    expected = model.generate(**batch(), max_new_tokens=8)
    model.generate(**batch(), max_new_tokens=8, custom_generate=outrider_generate(tokenizer=tiny_target.tokenizer))
    assert [type(module) for module in model.modules()] == kinds
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    assert model.config._attn_implementation == "sdpa"
    assert model.generation_config.to_dict() == settings
    assert torch.equal(model.generate(**batch(), max_new_tokens=8), expected)


def test_new_weights_and_another_model_are_noticed(model, tiny_target):
    loop = outrider_generate("ngram", tokenizer=tiny_target.tokenizer)
    other = copy.deepcopy(model)
    old = other.generate(**batch(), max_new_tokens=16, custom_generate=loop)
    engine = loop._engine
    assert torch.equal(other.generate(**batch(), max_new_tokens=16, custom_generate=loop), old)
    assert loop._engine is engine
    with torch.no_grad():
        other.lm_head.weight.mul_(-1)
    new = other.generate(**batch(), max_new_tokens=16, custom_generate=loop)
    assert not torch.equal(new, old)
    assert torch.equal(new, other.generate(**batch(), max_new_tokens=16))
    assert torch.equal(model.generate(**batch(), max_new_tokens=16, custom_generate=loop), old)


class Mine(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


class MyCriterion(MaxTimeCriteria):
    pass


REFUSED = {
    "num_beams": ({"num_beams": 2}, "generation_config.num_beams=2"),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 2}, "generation_config.no_repeat_ngram_size=2"),
    "typical_p": ({"do_sample": True, "typical_p": 0.5}, "generation_config.typical_p=0.5"),
    "output_scores": ({"output_scores": True, "return_dict_in_generate": True}, "generation_config.output_scores=True"),
    "max_time": ({"max_time": 1.0}, "generation_config.max_time=1.0"),
    "cache_implementation": ({"cache_implementation": "static"}, "generation_config.cache_implementation='static'"),
    "use_cache": ({"use_cache": False}, "use_cache=False"),
    "sequence_bias": ({"sequence_bias": [[[7, 8], 3.0]]}, "the logits processor SequenceBiasLogitsProcessor"),
    "processor": ({"logits_processor": LogitsProcessorList([Mine()])}, "the logits processor Mine"),
    "warper": (
        {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5)])},
        "the logits processor TemperatureLogitsWarper",
    ),
    "prefix": ({"prefix_allowed_tokens_fn": lambda b, ids: [5]}, "the logits processor PrefixConstrained"),
    "criterion": ({"stopping_criteria": StoppingCriteriaList([MyCriterion(9)])}, "the stopping criterion MyCriterion"),
    "position_ids": ({"position_ids": torch.full((3, 9), 4)}, "position_ids other than"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_refused_by_name(model, loops, name):
    asked, says = REFUSED[name]
    with pytest.raises(ConfigError, match=says):
        model.generate(**batch(), max_new_tokens=4, **asked, custom_generate=loops["none"])


def test_a_streamer_a_filled_cache_and_a_broken_mask_are_refused(model, loops, tiny_target):
    asked = {"max_new_tokens": 4, "custom_generate": loops["none"]}
    ids = batch()["input_ids"][1:2]
    with pytest.raises(ConfigError, match="streamer"):
        loops["none"](model, ids, [], [], model.generation_config, streamer=TextStreamer(tiny_target.tokenizer))
    with pytest.raises(ConfigError, match="synced_gpus=True"):
        loops["none"](model, ids, [], [], model.generation_config, synced_gpus=True)
    cache = DynamicCache()
    model(ids[:, :4], cache=cache)
    with pytest.raises(ConfigError, match="a cache that holds 4 tokens"):
        model.generate(ids, **asked, cache=cache)
    mask = torch.ones_like(ids)
    mask[0, 3] = 0
    with pytest.raises(ConfigError, match="attention_mask with gaps"):
        model.generate(ids, **asked, attention_mask=mask)


def test_a_model_made_in_memory_needs_a_tokenizer(model):
    made = AutoModelForCausalLM.from_config(model.config)
    made.name_or_path = ""
    with pytest.raises(ConfigError, match="pass tokenizer="):
        made.generate(**batch(), max_new_tokens=4, pad_token_id=0, custom_generate=outrider_generate())


@pytest.mark.parametrize("name", sorted(name for name in vars(GenerationConfig()) if not name.startswith("_")))
def test_every_field_of_a_generation_config_is_honoured_silent_or_refused(name):
    """Written from the schema: a field of a coming transformers is refused until it is known."""
    config = GenerationConfig()
    _check_config(config)
    setattr(config, name, 12345)
    if name in HONOURED or name in SILENT:
        _check_config(config)
    else:
        with pytest.raises(ConfigError, match=f"generation_config.{name}=12345"):
            _check_config(config)
    config = GenerationConfig()
    config.a_field_to_come = 1
    with pytest.raises(ConfigError, match="a_field_to_come"):
        _check_config(config)
