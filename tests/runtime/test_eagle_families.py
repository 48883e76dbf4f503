"""EAGLE-1 and every variant of EAGLE-3: what is trained is what is served, learns, and never changes a token."""

from __future__ import annotations

import itertools

import pytest
import torch

from drafters.batches import Batch
from drafters.config import Eagle3Config, TargetConfig
from drafters.config_drafter import EagleConfig
from drafters.corpus import ResponseRecord
from drafters.features import OnlineFeatures
from drafters.models.layout import Features, make_layout
from drafters.target import Target
from runtime import SamplingParams
from runtime.engine import Engine
from runtime.proposers.eagle import EagleProposer
from runtime.proposers.none import NoneProposer
from tests.drafters.training_setup import new_drafter, run_settings, run_training

SMALL = {"draft_vocab_size": 300, "ttt_steps": 3, "curriculum": []}
EAGLE3 = [Eagle3Config(**SMALL, fc_norm=fc, norm_output=out) for fc, out in itertools.product((False, True), repeat=2)]
FAMILIES = [EagleConfig(**SMALL, feature_noise=0.0), *EAGLE3]
every_family = pytest.mark.parametrize("cfg", FAMILIES, ids=["eagle", "eagle3", "output", "fc", "fc-output"])
TEXT = [5, 77, 301, 42, 199, 8, 8, 60, 411, 23, 90, 5]


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    """The tiny target as it was loaded, no engine having laid it out."""
    return Target.load(TargetConfig(name="tiny-random", path=str(tiny_target.folder), dtype="float32", device="cpu"))


@pytest.fixture
def drafter(target, cfg):
    found = new_drafter(target, [ResponseRecord("a", "chat", TEXT[:2], TEXT[2:], "length", 0.0, 0)],
                        run_settings(target, drafter=cfg))  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            elif parameter.requires_grad:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return found


@every_family
@torch.no_grad()
def test_training_logits_are_those_of_step_by_step_serving(target, cfg, drafter, monkeypatch):
    ids = torch.tensor([TEXT])
    size = len(TEXT)
    mask = torch.ones(1, 1, size, size, dtype=torch.bool).tril()
    positions = torch.arange(size)[None]
    taps = target.hidden(ids, positions, mask, drafter.taps_for(cfg, target))[0][0]
    batch = Batch(ids, positions, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool), (("a",),))
    graph, layout = drafter.training_graph(cfg, target), make_layout(batch, cfg.ttt_steps)
    trained: list[torch.Tensor] = []

    def keep(j, step, out, features):
        trained.append(drafter.logits(out))
        return torch.zeros(()), torch.ones(len(out), dtype=torch.bool)

    monkeypatch.setattr(graph, "step_loss", keep)
    graph(layout, Features(taps[:-1], None))
    proposer = EagleProposer(drafter.eval(), drafter.taps_for(cfg, target), top_k=1, depth=cfg.ttt_steps)
    proposer.reserve(1, size + 8)
    starts = [layout.active[step.reach].tolist() for step in layout.steps]
    assert [len(each) for each in starts] == [size - 2, size - 3, size - 4]
    for t in starts[0]:
        proposer.start(0, TEXT[: t + 1], TEXT[t + 1], taps[: t + 1])
        out = proposer._extend([0])
        for j in range(cfg.ttt_steps):
            if j:
                length, visible = t + 1, torch.ones(1, 1, 1, t + 1 + j, dtype=torch.bool)
                slot, token = torch.tensor([[length + j - 1]]), torch.tensor([[TEXT[t + 1 + j]]])
                hidden = proposer.drafter.feedback(out)[None]
                out = proposer._layer([0], token, hidden, slot, slot, visible)[0]
            wanted = trained[j][starts[j].index(t)]
            torch.testing.assert_close(drafter.logits(out)[0], wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
            if t not in starts[min(j + 1, cfg.ttt_steps - 1)]:
                break
        proposer.release(0)


@pytest.mark.parametrize(("cfg", "batch_size"), [(FAMILIES[0], 1), *((cfg, 3) for cfg in FAMILIES)])
def test_random_weights_never_change_a_token(tiny_target, make_engine, cfg, drafter, batch_size):
    prompts = [[3 + (7 * i + j) % 500 for j in range(4 + 3 * i)] for i in range(3)]
    params = [SamplingParams(10, temperature=0.9 if i == 1 else 0.0, seed=i, ignore_eos=True) for i in range(3)]
    wanted = make_engine(NoneProposer()).generate(prompts, params)
    settings = {"depth": 3, "num_draft_tokens": 8, "batch_size": batch_size, "debug": True}
    engine = Engine.load(tiny_target, (drafter, drafter.taps_for(cfg, tiny_target)), **settings)
    found = engine.generate(prompts, params)
    assert [r.token_ids for r in found] == [r.token_ids for r in wanted]
    assert engine.proposer.name == cfg.family and sum(r.stats.drafted for r in found) > 100


def test_eagle_learns_one_text_by_heart(target, tiny_target, make_engine, tmp_path, monkeypatch):
    real = OnlineFeatures.__init__

    def sharper(self, *args):
        real(self, *args)
        self.head = self.head * 30  # the random target is nearly undecided; its choices stay the same

    monkeypatch.setattr(OnlineFeatures, "__init__", sharper)
    prompt, params = list(range(5, 13)), SamplingParams(49, ignore_eos=True)
    plain = make_engine(NoneProposer()).generate([prompt], params)[0]
    record = ResponseRecord("a", "chat", prompt, plain.token_ids, "length", 0.0, 0)
    cfg = EagleConfig(draft_vocab_size=512, ttt_steps=3, curriculum=[], warm_start=False, feature_noise=0.0)
    run = run_settings(target, drafter=cfg, max_steps=40, tokens_per_step=40, warmup_ratio=0.1)
    drafter, _ = run_training(target, [record], run, tmp_path)
    engine = Engine.load(tiny_target, drafter, depth=4, num_draft_tokens=16)
    found = engine.generate([prompt], params)[0]
    assert found.token_ids == plain.token_ids
    assert sum(found.stats.accepted_at) >= 0.9 * 4 * found.stats.rounds
