"""MTP in the engine: it drafts what it was trained to, and changes no token whatever its weights."""

from __future__ import annotations

import pytest
import torch

from drafters.config import TargetConfig
from drafters.config_drafter import MtpConfig
from drafters.corpus import ResponseRecord
from drafters.models.layout import Features, make_layout
from drafters.models.ttt import TestTimeTraining
from drafters.target import Target
from runtime.engine import Engine
from runtime.proposers.eagle import EagleProposer
from runtime.sampling import SamplingParams
from tests.drafters.test_ttt import Labels, pack
from tests.drafters.training_setup import make_records, new_drafter, run_settings, run_training
from tests.runtime.conftest import PROMPTS


def _settings(target, **options):
    trainer = {name: options.pop(name) for name in ("max_steps", "learning_rate", "tokens_per_step") if name in options}
    drafter = MtpConfig(**{"draft_vocab_size": 512, "ttt_steps": 3, "curriculum": []} | options)
    return run_settings(target, drafter=drafter, **trainer)


@pytest.fixture(scope="module")
def wild(tiny_target):
    """Random weights, far from the target's."""
    drafter = new_drafter(tiny_target, make_records(4), _settings(tiny_target, draft_vocab_size=300))
    torch.manual_seed(3)
    for parameter in (p for p in drafter.parameters() if p.requires_grad and p.dim() > 1):
        torch.nn.init.normal_(parameter, std=0.3)
    return drafter


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_any_weights_leave_the_text_as_it_is(tiny_target, wild, temperature, batch_size):
    _same_as_plain(tiny_target, wild, 12, temperature, batch_size=batch_size)


def test_its_state_is_what_the_text_alone_gives(tiny_target, wild):
    _same_as_plain(tiny_target, wild, 7, 0.9, batch_size=2, debug=True)


def _same_as_plain(target, drafter, tokens: int, temperature: float, **options) -> None:
    params = [SamplingParams(tokens, temperature=temperature, seed=i, ignore_eos=True) for i in range(3)]
    plain = Engine.load(target, "none").generate(PROMPTS[:3], params)
    engine = Engine.load(target, drafter, num_draft_tokens=9, depth=4, top_k=3, **options)
    assert engine.proposer.name == "mtp" and engine.proposer.taps == (8,)
    answers = engine.generate(PROMPTS[:3], params)
    assert [a.token_ids for a in answers] == [p.token_ids for p in plain]
    assert sum(a.stats.drafted for a in answers) > 0


def test_trained_on_one_text_it_drafts_it(tiny_target, tmp_path):
    params = SamplingParams(21, ignore_eos=True)
    plain = Engine.load(tiny_target, "none").generate(PROMPTS[2:3], params)[0]
    record = ResponseRecord("one", "chat", plain.prompt_ids, plain.token_ids, "length", 0.0, 0)
    cfg = _settings(tiny_target, max_steps=50, learning_rate=1e-2, tokens_per_step=20)
    unpacked = Target.load(TargetConfig(name="tiny", path=str(tiny_target.folder), dtype="float32", device="cpu"))
    drafter, _ = run_training(unpacked, [record], cfg, tmp_path)
    engine = Engine.load(tiny_target, drafter, num_draft_tokens=4, depth=3, top_k=1)
    answer = engine.generate(PROMPTS[2:3], params)[0]
    assert answer.token_ids == plain.token_ids
    assert answer.stats.accepted >= 0.9 * 3 * answer.stats.rounds


def test_training_computes_what_decoding_computes(tiny_target, wild):
    """Every row of every step of the rollout, beside the runtime's own calls over the same tokens."""
    steps, prompt, response = 3, 4, 7
    ids = torch.randint(3, 300, (prompt + response,), generator=torch.Generator().manual_seed(1)).tolist()
    batch = pack([(prompt, response)], prompt + response, ids)
    layout = make_layout(batch, steps)
    taps = tiny_target.backbone(batch.ids).last_hidden_state[0]
    labels, graph, read = Labels(len(ids)), TestTimeTraining(wild, 1.0, MtpConfig().loss), []
    labels.probabilities = torch.full((len(ids), 300), 1 / 300)
    spy = wild.layer.shared_head["norm"].register_forward_hook(lambda module, inputs, out: read.append(out))
    graph(layout, Features(taps[layout.active], labels.features(layout).teacher))
    spy.remove()
    proposer = EagleProposer(wild, (8,), 1, steps)
    proposer.reserve(1, 64)
    for t in range(prompt - 2, len(ids) - 2):
        proposer.start(0, ids[: t + 1], ids[t + 1], taps[: t + 1])
        out = proposer._extend([0])
        visible = torch.ones(1, 1, 1, t + 1, dtype=torch.bool)
        for j in range(min(steps, len(ids) - 2 - t)):
            if j:
                at = torch.tensor([[t + j]])
                visible = torch.nn.functional.pad(visible, (0, 1), value=True)
                hidden = wild.feedback(out)[:, None]
                out = proposer._layer([0], torch.tensor([[ids[t + 1 + j]]]), hidden, at, at, visible)[:, 0]
            row = (layout.active[layout.steps[j].reach] == t).nonzero().item()
            torch.testing.assert_close(wild.logits(out)[0], wild.lm_head(read[j][row]), rtol=1e-5, atol=1e-5)
        proposer.release(0)
