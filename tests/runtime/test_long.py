"""Two thousand short requests in one process: memory and acceptance stay what they were."""

import gc

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from drafters.config import TargetConfig
from drafters.models.eagle3 import Eagle3Drafter, Eagle3Shape
from drafters.target import Target
from runtime.engine import Engine, EngineConfig
from runtime.metrics import Stats, Times
from runtime.proposers.eagle import EagleProposer
from runtime.sampling import SamplingParams

REQUESTS, PASSES = 250, 8
PROMPTS = [[3 + (i * 7 + j * j) % 90 for j in range(3 + i % 9)] * 2 for i in range(REQUESTS)]


@pytest.fixture
def engine(tiny_target) -> Engine:
    """Two layers, so that two thousand requests take seconds, and an untrained EAGLE-3 drafter."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    drafter = Eagle3Drafter(Eagle3Shape(32, 32, 32, 4, 2, 8, 1e-5, 1e4, 2048, 96, 96)).eval()
    drafter.bind_vocab(torch.zeros(96, dtype=torch.long), torch.ones(96, dtype=torch.bool))
    drafter.bind_embedding(model.get_input_embeddings().weight)
    target = Target(model, tiny_target.tokenizer, TargetConfig(name="two layers"), None, (1,))
    settings = EngineConfig(batch_size=8, num_draft_tokens=6, depth=2)
    return Engine(target, EagleProposer(drafter, (0, 1, 2), top_k=4, depth=2), settings)


def held() -> tuple[int, int]:
    """Bytes in tensors alive; objects of this package and entries of the containers they hold.

    Times apart, whose buckets are bounded but depend on the clock.
    """
    gc.collect()
    things = gc.get_objects()
    tensors = [thing for thing in things if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_mkldnn}
    ours = [
        thing for thing in things if str(type(thing).__module__).startswith("runtime.") and not isinstance(thing, Times)
    ]
    fields = [value for thing in ours if hasattr(thing, "__dict__") for value in vars(thing).values()]
    return sum(storages.values()), len(ours) + sum(len(f) for f in fields if isinstance(f, (dict, list, set, tuple)))


def test_two_thousand_short_requests_leave_memory_and_acceptance_constant(engine):
    passes = []
    for _ in range(PASSES):
        params = [SamplingParams(max_new_tokens=4, temperature=float(i % 2), seed=i) for i in range(REQUESTS)]
        results = engine.generate(PROMPTS, params)
        total = Stats()
        for result in results:
            total.add(result.stats)
        texts = hash(str([result.token_ids for result in results]))
        tau, accepted = total.acceptance_length, tuple(total.accepted_at)
        del results, result, total
        passes.append((tau, accepted, texts, held()))
    taus, accepted, texts, memory = (set(one) for one in zip(*passes[1:]))
    assert taus == {passes[0][0]}
    assert passes[0][0] > 1.02  # something is accepted, or constant acceptance would prove nothing
    assert accepted == {passes[0][1]}
    assert texts == {passes[0][2]}
    assert len(memory) == 1, memory  # of the second pass on: the first made the caches
    cache = engine._runner.cache
    assert [cache.length(row) for row in range(8)] == [0] * 8
    assert [cache.free(row) for row in range(8)] == [cache.num_slots] * 8
