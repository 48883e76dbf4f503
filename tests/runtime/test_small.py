"""A distilled small model in the engine: it drafts its draft vocabulary, and changes no token whatever its weights."""

from __future__ import annotations

import pytest
import torch

from drafters.config import TargetConfig
from drafters.config_drafter import Objective, SmallConfig
from drafters.corpus import ResponseRecord
from drafters.errors import ContractError
from drafters.export import describe_drafter, export_drafter
from drafters.losses import Teacher
from drafters.models.layout import Features
from drafters.models.small import SmallDrafter, SmallTraining
from drafters.target import Target
from runtime.engine import Engine
from runtime.proposers.base import Budget
from runtime.proposers.small import distilled
from runtime.sampling import DraftNoise, Noise, SamplingParams
from tests.drafters.export_setup import edit_tensors, put
from tests.drafters.test_ttt import pack
from tests.drafters.training_setup import make_records, new_drafter, run_settings, run_training
from tests.runtime.conftest import PROMPTS


def _settings(target, trainer=None, **options):
    drafter = SmallConfig(**{"draft_vocab_size": 300, "num_layers": 2} | options)
    return run_settings(target, drafter=drafter, **(trainer or {}))


@pytest.fixture(scope="module")
def wild(tiny_target):
    """Random weights, far from the target's, on the last 300 ids: no draft id is a target id of its number."""
    drafter = new_drafter(tiny_target, make_records(4), _settings(tiny_target))
    drafter.bind_vocab(torch.full((300,), 212), torch.arange(512) >= 212)
    drafter.bind(tiny_target)
    torch.manual_seed(3)
    for parameter in (p for p in drafter.parameters() if p.requires_grad and p.dim() > 1):
        torch.nn.init.normal_(parameter, std=0.2)
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
    assert engine.proposer.name == "small" and engine.proposer.taps == ()
    answers = engine.generate(PROMPTS[:3], params)
    assert [a.token_ids for a in answers] == [p.token_ids for p in plain]
    assert sum(a.stats.drafted for a in answers) > 0


def test_trained_on_one_text_it_drafts_it(tiny_target, tmp_path):
    params = SamplingParams(21, ignore_eos=True)
    plain = Engine.load(tiny_target, "none").generate(PROMPTS[2:3], params)[0]
    record = ResponseRecord("one", "chat", plain.prompt_ids, plain.token_ids, "length", 0.0, 0)
    cfg = _settings(tiny_target, {"max_steps": 60, "learning_rate": 5e-3, "tokens_per_step": 20}, draft_vocab_size=512)
    unpacked = Target.load(TargetConfig(name="tiny", path=str(tiny_target.folder), dtype="float32", device="cpu"))
    drafter, _ = run_training(unpacked, [record], cfg, tmp_path)
    engine = Engine.load(tiny_target, drafter, num_draft_tokens=4, depth=3, top_k=1)
    answer = engine.generate(PROMPTS[2:3], params)[0]
    assert answer.token_ids == plain.token_ids
    assert answer.stats.accepted >= 0.9 * 3 * answer.stats.rounds


def test_training_computes_what_decoding_computes(tiny_target, wild):
    """The logits at every supervised position, beside the runtime's own over the same tokens, token by token."""
    prompt, response = 4, 7
    ids = torch.randint(3, 300, (prompt + response,), generator=torch.Generator().manual_seed(1)).tolist()
    layout = SmallDrafter.layout(pack([(2, 3), (prompt, response)], 20, [5, 6, 7, 8, 9, *ids]), 3)
    rows = len(layout.teacher)
    teacher = Teacher(torch.full((rows, 300), 1 / 300), torch.zeros(rows, dtype=torch.int64))
    read = []
    spy = wild.norm.register_forward_hook(lambda module, inputs, out: read.append(out[0]))
    SmallTraining(wild, Objective())(layout, Features(torch.empty(len(layout.active), 0), teacher))
    spy.remove()
    trained = wild.lm_head(read[0][layout.steps[0].reach])[3:]  # the second document's
    proposer = distilled(wild, tiny_target, 4)
    proposer.reserve(1, 64)
    proposer.start(0, ids[: prompt - 1], ids[prompt - 1], None)
    for t in range(prompt - 1, len(ids) - 1):
        torch.testing.assert_close(proposer._run({0: []})[0], trained[t - prompt + 1], rtol=1e-5, atol=1e-5)
        proposer.commit(0, [ids[t + 1]], None)


def test_drafts_and_their_law_are_in_the_targets_ids(tiny_target, wild):
    proposer = distilled(wild, tiny_target, 4)
    proposer.reserve(1, 64)
    proposer.start(0, [5, 6], 7, None)
    noise = DraftNoise(Noise(9, 512), root=2, temperature=0.8)
    tree = proposer.propose({0: Budget(6, 3, noise, drawn=True)})[0]
    kept = wild.t2d.nonzero().flatten()
    assert set(tree.tokens[1:]) <= set(kept.tolist())
    logits = wild.language_model()(torch.tensor([[5, 6, 7]])).logits[0, -1]
    q = torch.softmax(logits.double() / 0.8, -1)
    assert torch.allclose(tree.draft_probs[0, kept], q, atol=1e-6) and tree.draft_probs[0].sum() == pytest.approx(1.0)
    drawn = kept[(q.log() + noise.at(1)[kept]).topk(3).indices].tolist()
    assert [tree.tokens[n] for n in range(len(tree)) if tree.parents[n] == 0] == drawn


def test_an_export_is_served_by_its_folder_and_as_any_small_model(tiny_target, wild, tmp_path):
    contract = describe_drafter(wild, tiny_target, taps=(), steps=5, max_length=64)
    folder = export_drafter(wild, tiny_target, contract, tmp_path / "export", command="python train.py drafter=small")
    params = SamplingParams(10, ignore_eos=True)
    plain = Engine.load(tiny_target, "none").generate(PROMPTS[:2], params)
    for path, rows in ((str(folder), 300), (f"small:{folder}", 512)):
        engine = Engine.load(tiny_target, path, num_draft_tokens=4, depth=3)
        assert len(engine.proposer.target_ids) == rows
        answers = engine.generate(PROMPTS[:2], params)
        assert [a.token_ids for a in answers] == [p.token_ids for p in plain]
    edit_tensors(folder, put("model.layers.0.mlp.up_proj.weight", lambda tensor: -tensor))
    with pytest.raises(ContractError, match="probe text 0: drafter logits differ"):
        Engine.load(tiny_target, folder)
