import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from runtime.processors import Processors
from runtime.sampling import SamplingParams, choose
from runtime.tree import DraftTree
from tests.runtime.enumeration import paths

VOCAB, EOS = 12, (3, 7)
PROMPT = [5, 1, 5, 9, 2]
IDS = [*PROMPT, 4, 4, 8, 9]
# Depth first, so that nodes of one depth are not neighbours; tokens repeat along a path and across siblings.
TREE = DraftTree((9, 4, 9, 3, 2, 1, 9, 8), (-1, 0, 1, 2, 1, 0, 5, 0), (0, 1, 2, 3, 2, 1, 2, 1))
ASKED = {
    "repetition_penalty": 1.6,
    "logit_bias": ((2, 3.0), (9, -1.5)),
    "bad_words": ((9,), (4, 9), (8, 9, 4), (9, 4, 2)),
    "min_tokens": 7,
    "top_k": 5,
    "top_p": 0.8,
    "min_p": 0.1,
}
IN_TRANSFORMERS = {
    "repetition_penalty": {"repetition_penalty": 1.6},
    "logit_bias": {"sequence_bias": {(2,): 3.0, (9,): -1.5}},
    "bad_words": {"bad_words_ids": [[9], [4, 9], [8, 9, 4], [9, 4, 2]]},
    "min_tokens": {"min_new_tokens": 7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
}


@pytest.fixture(scope="module")
def model():
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )


@pytest.fixture
def logits():
    return 2 * torch.randn(len(TREE), VOCAB, generator=torch.Generator().manual_seed(4))


def transformers_scores(model, names, temperature: float, scores: torch.Tensor, history: list[int]) -> torch.Tensor:
    """What model.generate would sample from after this one history, [V]."""
    settings = {key: value for name in names for key, value in IN_TRANSFORMERS[name].items()}
    settings.setdefault("top_k", 0)
    config = GenerationConfig(do_sample=True, temperature=temperature, eos_token_id=list(EOS), **settings)
    model._prepare_special_tokens(config)
    chain = model._get_logits_processor(config, input_ids_seq_length=len(PROMPT), device="cpu")
    return chain(torch.tensor([history]), scores[None])[0]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("names", [*[(name,) for name in ASKED], tuple(ASKED)], ids=lambda names: "+".join(names))
def test_each_node_equals_transformers_on_its_own_history(model, logits, names, temperature):
    """Same floats, node by node: the same processors, order and history, the temperature divided out once."""
    params = SamplingParams(temperature=temperature, **{name: ASKED[name] for name in names})
    before = logits.clone()
    found = Processors.build(params, len(PROMPT), EOS).apply(logits, TREE, IDS)
    assert torch.equal(logits, before)
    for node, path in enumerate(paths(TREE)):
        expected = transformers_scores(model, names, temperature, logits[node], [*IDS, *path])
        assert torch.equal(found[node] / temperature, expected), f"node {node}"


def test_chosen_nodes_alone_are_processed_the_same(logits):
    processors = Processors.build(SamplingParams(temperature=0.9, presence_penalty=0.5, **ASKED), len(PROMPT), EOS)
    every = processors.apply(logits, TREE, IDS)
    for nodes in ([0], [6], [3, 0, 5], [7, 6, 5]):
        assert torch.equal(processors.apply(logits, TREE, IDS, nodes), every[nodes])


def test_presence_and_frequency_count_the_answer_and_the_nodes_own_path(logits):
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25)
    found = Processors.build(params, len(PROMPT), EOS).apply(logits, TREE, IDS)
    for node, path in enumerate(paths(TREE)):
        answer = [*IDS[len(PROMPT) :], *path]
        for token in range(VOCAB):
            count = answer.count(token)
            expected = float(logits[node, token]) - 0.5 * (count > 0) + 0.25 * count
            assert float(found[node, token]) == pytest.approx(expected, abs=1e-6)


def test_end_ids_wait_for_min_tokens_by_depth(logits):
    """Four tokens are out and seven asked: depths 0 to 2 choose the 5th to 7th, depth 3 the 8th."""
    found = Processors.build(SamplingParams(min_tokens=7), len(PROMPT), EOS).apply(logits, TREE, IDS)
    for node, depth in enumerate(TREE.depths):
        assert found[node, list(EOS)].isneginf().all() == (depth < 3)


def test_an_end_id_among_the_bad_words_is_ruled_out_too(logits):
    found = Processors.build(SamplingParams(bad_words=((3,),)), len(PROMPT), EOS).apply(logits, TREE, IDS)
    assert found[:, 3].isneginf().all() and found[:, 7].isfinite().all()


def test_nothing_to_do_is_none_and_warpers_wait_for_a_temperature():
    assert Processors.build(SamplingParams(), 5, EOS) is None
    assert Processors.build(SamplingParams(temperature=0.7), 5, EOS) is None
    assert Processors.build(SamplingParams(top_k=2, top_p=0.5, min_p=0.1), 5, EOS) is None
    assert Processors.build(SamplingParams(min_tokens=2), 5, ()) is None
    assert Processors.build(SamplingParams(temperature=0.7, top_k=2), 5, EOS) is not None


def test_greedy_under_penalties_is_the_processed_argmax(logits):
    params = SamplingParams(repetition_penalty=1.6, frequency_penalty=1.0, top_k=1)
    found = Processors.build(params, len(PROMPT), EOS).apply(logits, TREE, IDS)
    assert choose(found, [0] * len(TREE), params).tolist() == found.argmax(-1).tolist()
    assert found.argmax(-1).tolist() != logits.argmax(-1).tolist()


def test_a_text_that_does_not_end_at_the_root_is_refused(logits):
    processors = Processors.build(SamplingParams(repetition_penalty=2.0), len(PROMPT), EOS)
    with pytest.raises(ValueError, match="ends in token 8 but the tree's root is 9"):
        processors.apply(logits, TREE, IDS[:-1])


def test_a_request_that_rules_out_every_token_is_refused():
    params = SamplingParams(bad_words=tuple((token,) for token in range(4)))
    found = Processors.build(params, 1, ()).apply(torch.zeros(1, 4), DraftTree.root(2), [2])
    with pytest.raises(ValueError, match="no token is left at position 6"):
        choose(found, [6], params)
