import dataclasses

import pytest
import torch

from runtime import Engine, SamplingParams
from tests.runtime.conftest import PROMPTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafted_text_on_the_gpu_equals_plain_text_on_the_gpu(tiny_config, random_drafter, temperature):
    target = dataclasses.replace(tiny_config, device="cuda")
    params = SamplingParams(max_new_tokens=32, temperature=temperature, seed=3)
    plain = Engine.load(target).generate(PROMPTS, params)
    drafted = Engine.load(target, random_drafter.cuda(), batch_size=3).generate(PROMPTS, params)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
