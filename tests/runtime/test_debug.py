"""Debug mode: what is kept between rounds equals what the text gives, and a planted difference is found and named."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from drafters.attention_kinds import within
from drafters.config import TargetConfig
from drafters.models.eagle3 import Eagle3Drafter, Eagle3Shape
from drafters.target import Target
from runtime import forward
from runtime.calibration import Calibration
from runtime.debug import Audit, DebugError, _difference
from runtime.engine import Engine, EngineConfig
from runtime.kv_cache import SlotCache
from runtime.proposers.eagle import EagleProposer
from runtime.proposers.merge import MergeProposer
from runtime.proposers.none import NoneProposer
from runtime.proposers.small import SmallProposer
from runtime.sampling import SamplingParams
from tests.runtime.conftest import Scripted

WINDOW = 9
PROMPTS = [[3 + (7 * i + j * j) % 500 for j in range(4 + 9 * i)] for i in range(6)]


class ScriptedEagle(EagleProposer):
    """EAGLE's whole state, kept by its own code, under trees whose accept counts are scripted."""

    def __init__(self, script: Scripted, drafter, taps):
        super().__init__(drafter, taps, top_k=4, depth=5)
        self.script = script

    def start(self, row, prompt, token, taps):
        super().start(row, prompt, token, taps)
        self.script.start(row, prompt, token, taps)

    def propose(self, budgets):
        super().propose(budgets)
        return self.script.propose(budgets)

    def commit(self, row, tokens, taps):
        super().commit(row, tokens, taps)
        if row in self.script.rows:  # start() hands the prompt to commit()
            self.script.commit(row, tokens, taps)

    def release(self, row):
        super().release(row)
        self.script.release(row)


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    """Windows of 9 positions in five of six layers, as in Gemma 3."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=WINDOW,
        max_position_embeddings=512,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.mul_(6 if "q_proj" in name or "k_proj" in name else 2 if parameter.dim() > 1 else 1)
    return Target(model, tiny_target.tokenizer, TargetConfig(name="gemma"), None, ())


@pytest.fixture(scope="module")
def plain(target):
    return Engine(target, NoneProposer(), EngineConfig()).generate(PROMPTS, SamplingParams(max_new_tokens=90))


@pytest.fixture
def engine(target, plain):
    """Batch 3, trees of up to 16 nodes of which 0 to 5 are accepted, another count per row and round."""
    pattern = random.Random(0)
    counts = [[pattern.randrange(6) for _ in range(3)] for _ in range(300)]
    answers = {tuple(result.prompt_ids): result.token_ids for result in plain}
    script = Scripted(answers, lambda r, row: counts[r % 300][row], 512, siblings=2)
    torch.manual_seed(1)
    drafter = Eagle3Drafter(Eagle3Shape(32, 32, 48, 4, 2, 8, 1e-5, 1e4, 2048, 512, 300)).eval()
    kept = torch.zeros(512, dtype=torch.bool)
    kept[:300] = True
    drafter.bind_vocab(torch.zeros(300, dtype=torch.long), kept)
    drafter.bind_embedding(target.embed_weight)
    return Engine(target, ScriptedEagle(script, drafter, (2, 3, 5)), EngineConfig(batch_size=3, debug=True))


@pytest.fixture
def checked(monkeypatch) -> list[int]:
    """How many running rows each check looked at."""
    real, counts = Audit.check, []

    def check(self, rows):
        real(self, rows)
        counts.append(len(rows))

    monkeypatch.setattr(Audit, "check", check)
    return counts


def test_fifty_rounds_of_every_accept_count_past_the_window(engine, plain, checked):
    results = engine.generate(PROMPTS, SamplingParams(max_new_tokens=90))
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert len(checked) >= 50
    assert checked.count(3) >= 20
    reached = [0] * 6
    for result in results:
        for depth, count in enumerate(result.stats.accepted_at, start=1):
            reached[depth] += count
    assert min(reached[1:]) > 5
    assert min(len(r.prompt_ids) + 90 for r in results) > 6 * WINDOW


def test_sampled_rounds_pass_too(engine, checked):
    engine.proposer.script.answers = {tuple(prompt): [5] * 99 for prompt in PROMPTS}
    engine.generate(PROMPTS[:3], SamplingParams(max_new_tokens=20, temperature=1.0, seed=1))
    assert sum(checked) > 30


POINTS = [
    ("_runner", "prefill"),
    ("proposer", "start"),
    ("proposer", "propose"),
    ("_runner", "run"),
    ("_runner", "logits"),
    ("proposer", "commit"),
    ("_runner.cache", "commit"),
    ("_runner.cache", "take"),
]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("owner", "method"), POINTS)
@pytest.mark.parametrize("call", [1, 8])
def test_an_abort_at_each_point_leaves_nothing_behind(engine, plain, monkeypatch, owner, method, after, call):
    engine._reserve(400)
    place = engine
    for name in owner.split("."):
        place = getattr(place, name)
    real, calls = getattr(place, method), []

    def aborting(*args):
        calls.append(1)
        if len(calls) < min(call, 4 if method in ("prefill", "start") else call):
            return real(*args)
        if after:
            real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(place, method, aborting)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, SamplingParams(max_new_tokens=90))
    Audit(engine._runner, engine.proposer).check({})
    results = engine.generate(PROMPTS[:3], SamplingParams(max_new_tokens=8))
    assert [r.token_ids for r in results] == [r.token_ids[:8] for r in plain[:3]]


def keep_a_sibling(patch, engine):
    real = SlotCache.commit

    def commit(self, row, taken, kept):
        last = kept[-1]
        real(self, row, taken, [*kept[:-1], taken[taken.index(last) - 1] if len(kept) < len(taken) else last])

    patch.setattr(SlotCache, "commit", commit)


def lose_a_slot(patch, engine):
    real = SlotCache.commit
    patch.setattr(SlotCache, "commit", lambda self, row, taken, kept: real(self, row, taken[:-1], kept))


def forget_to_release(patch, engine):
    patch.setattr(engine._runner.cache, "release", lambda row: None)


def window_one_too_wide(patch, engine):
    patch.setattr(forward, "within", lambda q, k, window: within(q, k, window + 1))


def window_by_slot(patch, engine):
    patch.setattr(forward, "within", lambda q, k, window: q[..., None] - torch.arange(k.shape[1])[None, None] < window)


def see_siblings(patch, engine):
    patch.setattr(forward, "ancestors_of", lambda parents, depth: torch.ones(*parents.shape, parents.shape[1]).bool())


def flat_positions(patch, engine):
    real = forward._lay_out

    def laid(trees, slots, starts, trash):
        found, depth = real(trees, slots, starts, trash)
        found[2, :, 1:] = found[2, :, :1] + range(1, found.shape[2])
        return found, depth

    patch.setattr(forward, "_lay_out", laid)


def stale_taps(patch, engine):
    real = engine.proposer.commit
    patch.setattr(engine.proposer, "commit", lambda row, tokens, taps: real(row, tokens, taps.flip(0)))


def drafted_keys_survive(patch, engine):
    real = engine.proposer._extend

    def extend(rows):
        out = real(rows)
        for row in rows:
            engine.proposer.cache.keys[row, :, engine.proposer._rows[row].length - 1] += 1
        return out

    patch.setattr(engine.proposer, "_extend", extend)


def one_layer_not_written(patch, engine):
    layer = engine._runner.cache.layers[4]
    real = layer.update

    def update(keys, values, *args, **kwargs):
        return real(keys, values * 1.01 if keys.shape[2] < 20 else values, *args, **kwargs)

    patch.setattr(layer, "update", update)


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (keep_a_sibling, r"row \d, (keys of layer 0|positions of the committed slots|root|cache length)"),
        (lose_a_slot, r"row \d, free slots: kept \d+, from scratch \d+"),
        (forget_to_release, r"row \d, cache length: kept \d+, from scratch 0"),
        (window_one_too_wide, r"row \d, sliding_attention mask of node 0: positions of the text"),
        (window_by_slot, r"row \d, sliding_attention mask of node \d+: "),
        (see_siblings, r"row \d, \w+ mask of node 0: slots of the tree"),
        (flat_positions, r"row \d, "),
        (stale_taps, r"row \d, features not yet run: kept .* at \[\d+, \d+\], from scratch"),
        (drafted_keys_survive, r"row \d, draft keys: kept .* at \[\d+, \d+, \d+\], from scratch"),
        (one_layer_not_written, r"row \d, values of layer 4: kept .*, from scratch"),
    ],
)
def test_a_planted_bug_is_found_and_named(engine, monkeypatch, plant, says):
    engine._reserve(400)
    with monkeypatch.context() as patch:
        plant(patch, engine)
        with pytest.raises(DebugError, match=says):
            engine.generate(PROMPTS, SamplingParams(max_new_tokens=90))


@pytest.mark.parametrize("plant", [None, "small: keys of layer 2", "small: tokens not yet run", "eagle3: draft keys"])
def test_members_of_a_merged_tree_are_checked_too(engine, target, plain, monkeypatch, checked, plant):
    small, eagle = SmallProposer(target, 512, top_k=2), EagleProposer(engine.proposer.drafter, (2, 3, 5), 4, 5)
    merged = Engine(target, MergeProposer([small, eagle], Calibration()), EngineConfig(batch_size=3, debug=True))
    merged._reserve(400)

    def after(owner, name, spoil):
        real = getattr(owner, name)

        def spoiled(*args):
            out = real(*args)
            spoil()
            return out

        monkeypatch.setattr(owner, name, spoiled)

    if plant == "small: keys of layer 2":
        layer = small._runner.cache.layers[2]
        after(small, "propose", lambda: setattr(layer, "keys", layer.keys * 1.01))
    if plant == "small: tokens not yet run":
        after(small, "commit", lambda: [row.pending.reverse() for row in small._rows.values()])
    if plant == "eagle3: draft keys":
        after(eagle, "propose", lambda: setattr(eagle.cache, "keys", eagle.cache.keys * 1.01))
    if plant is None:
        results = merged.generate(PROMPTS[:4], SamplingParams(max_new_tokens=20))
        assert [r.token_ids for r in results] == [r.token_ids[:20] for r in plain[:4]]
        assert len(checked) > 6
    else:
        with pytest.raises(DebugError, match=rf"row \d, {plant}: kept .*, from scratch"):
            merged.generate(PROMPTS[:4], SamplingParams(max_new_tokens=20))


def test_numbers_that_are_not_finite_or_of_another_shape_differ():
    truth = torch.ones(2, 3)
    assert _difference(truth.clone(), truth) is None
    assert _difference(truth.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(float("nan"))), truth)
    assert _difference(truth[:1], truth) == ("shape [1, 3]", "shape [2, 3]")
    assert _difference(truth + 2e-4, truth)[1] == "1"
