"""The doctor's rules on numbers, and its measurements on records and a drafter whose answers are known."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from drafters import doctor_data as data
from drafters.batches import collate
from drafters.chat import render_prompt
from drafters.config_drafter import Eagle3Config
from drafters.corpus import ResponseRecord
from drafters.doctor import CAUSES, RULES, diagnose
from drafters.errors import ConfigError, DataError
from drafters.features import OnlineFeatures
from drafters.measures import Boundaries, Coverage, Curve, Forced, Group, Measures, OnPolicy, Served
from drafters.models.eagle3 import Eagle3Drafter
from drafters.models.layout import make_layout
from drafters.saved_run import read_run
from tests.drafters.export_setup import TAPS, build_drafter

GROUPS = {"chat": Group(2.1, 60), "code": Group(1.9, 60)}
SERVED = Served(
    tau=2.0, acceptance_at=[0.6, 0.3], chain_tau=1.9, chain_at=[0.6, 0.3], forced_tau=1.9, forced_at=[0.6, 0.3],
    tau_t1=1.95, rounds=120, draft_share=0.2, plain_share=0.02, by_category=GROUPS,
    by_length={"up to 32 tokens": Group(2.0, 120)},
)  # fmt: skip
HEALTHY = Measures(
    steps=3, distinct_tokens=50_000, temperature=0.0, boundaries=Boundaries(100, 0, 0),
    on_policy=OnPolicy(4000, 0.98, 0.4, None), coverage=Coverage(0.99, 0.99, 0.97), mask_share=0.6, cut_share=0.0,
    trained=Forced([0.6, 0.5], [0.6, 0.4]), held_out=Forced([0.55, 0.45], [0.55, 0.35]), served=SERVED,
    curve=Curve("eval/acc_0", 0.1, 0.05, 8, 1e5, 0.05),
)  # fmt: skip


def served(**changes) -> dict:
    return {"served": dataclasses.replace(SERVED, **changes)}


# ---- rules ------------------------------------------------------------------------------------------------------


def test_a_healthy_run_has_no_finding():
    assert diagnose(HEALTHY) == []
    # Answers of mixed temperatures, and none that can be judged, are no fault either.
    assert diagnose(dataclasses.replace(HEALTHY, temperature=None, on_policy=None, curve=None)) == []


@pytest.mark.parametrize(
    ("cause", "changes", "words", "effect"),
    [
        ("wrong_template", {"boundaries": Boundaries(100, 0, 50)}, "50 of 100 prompts", 1.0),
        ("shifted_mask", {"boundaries": Boundaries(100, 30, 0, 2)}, "by 2 tokens: the prompt holds the first", 0.6),
        ("shifted_mask", {"boundaries": Boundaries(100, 30, 0, -1)}, "by 1 token: the prompt ends inside", 0.6),
        ("off_policy_data", {"on_policy": OnPolicy(4000, 0.6, 2.5, None)}, "only 60% of the greedy", 0.8),
        ("off_policy_data", {"on_policy": OnPolicy(4000, None, 2.5, 0.5)}, "0.50 more than answers of its own", 1.0),
        ("small_draft_vocabulary", {"coverage": Coverage(0.8, 0.7, 0.6)}, "70.0% of the target's choices", 0.6),
        ("too_little_data", {"held_out": Forced([0.3, 0.2], [0.3, 0.1])}, "50,000 distinct answer tokens", 0.6),
        ("more_data", {"curve": Curve("eval/acc_0", 0.1, 0.1, 8, 1e5, 0.2)}, "about +0.20 tau", 0.2),
        ("train_serve_gap", served(chain_tau=1.4, chain_at=[0.3, 0.1]), "(accepted by depth 0.30, 0.10)", 0.5),
        ("answers_cut", {"cut_share": 0.5}, "50% of the answers' tokens", 0.3),
        ("temperature_mismatch", served(tau_t1=1.6), "2.00 at temperature 0 and 1.60 at temperature 1", 0.4),
        ("draft_too_slow", served(draft_share=0.5), "drafting takes 50% of a round's time", 2 * 0.15 / 0.85),
        (
            "drafting_switched_off",
            served(tau=1.02, tau_t1=1.01, plain_share=0.98),
            "in 98% of the rounds the runtime drafted nothing",
            0.88,
        ),
        ("weak_category", served(by_category={"chat": Group(2.5, 60), "code": Group(1.5, 60)}), "category code", 0.5),
        ("weak_length", served(by_length={"up to 32 tokens": Group(2.5, 90), "x": Group(1.5, 30)}), "of x", 0.25),
    ],
)
def test_each_cause_by_its_numbers(cause, changes, words, effect):
    [finding] = diagnose(dataclasses.replace(HEALTHY, **changes))
    assert finding.cause == cause and words in finding.evidence and finding.advice.endswith((".", ")"))
    assert finding.effect == pytest.approx(effect)


def test_numbers_just_good_enough_are_no_finding():
    edge = dataclasses.replace(
        HEALTHY,
        boundaries=Boundaries(100, 1, 1, 2),
        on_policy=OnPolicy(4000, 0.91, 0.4, None),
        coverage=Coverage(0.95, 0.91, 0.5),  # new text may say what training never showed: a matter of data
        cut_share=0.09,
        held_out=Forced([0.5, 0.4], [0.5, 0.21]),
        curve=Curve("eval/acc_0", 0.1, 0.05, 8, 1e5, 0.09),
        **served(
            chain_tau=1.82,
            tau_t1=1.88,
            draft_share=0.39,
            plain_share=0.49,
            by_category={"a": Group(2.5, 90), "b": Group(1.2, 19)},
        ),
    )
    assert diagnose(edge) == []
    assert diagnose(dataclasses.replace(HEALTHY, on_policy=OnPolicy(4000, None, 0.4, 0.2))) == []


def test_the_costliest_comes_first_and_of_equals_the_root():
    found = dataclasses.replace(
        HEALTHY,
        boundaries=Boundaries(100, 0, 100),
        coverage=Coverage(0.0, 0.0, 0.0),
        curve=Curve("eval/acc_0", 0.1, 0.1, 8, 1e5, 0.2),
    )
    causes = [finding.cause for finding in diagnose(found)]
    assert causes == ["wrong_template", "small_draft_vocabulary", "more_data"]


def test_answers_of_another_target_are_said_to_be():
    found = dataclasses.replace(
        HEALTHY, on_policy=OnPolicy(400, 0.5, 3.0, None), other_target="target_weights_sha256"
    )
    assert "collected from another target (target_weights_sha256)" in diagnose(found)[0].evidence
    assert len(CAUSES) == len(set(CAUSES)) >= len(RULES)


# ---- prompts ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tiny_target):
    return data.edges(tiny_target.tokenizer)


def record(tiny_target, text: str = "hello", answer: tuple[int, ...] = tuple(range(40, 46)), **turns) -> ResponseRecord:
    messages = [{"role": role, "content": words} for role, words in turns.items()]
    ids = render_prompt(tiny_target.tokenizer, [*messages, {"role": "user", "content": text}])
    return ResponseRecord(text, "chat", ids, list(answer), "length", 0.0, 0)


def moved(own: ResponseRecord, by: int) -> ResponseRecord:
    ids, at = own.prompt_ids + own.response_ids, len(own.prompt_ids) + by
    return dataclasses.replace(own, prompt_ids=ids[:at], response_ids=ids[at:])


def test_edges_are_what_every_prompt_shares(tiny_target, found):
    tokenizer = tiny_target.tokenizer
    assert [tokenizer.decode(list(start)) for start in found.starts] == ["<|im_start|>user\n", "<|im_start|>system\n"]
    assert tokenizer.decode(list(found.end)) == "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("by", [-7, -1, 0, 1, 3])
def test_a_shifted_boundary_is_measured(tiny_target, found, by):
    for own in (record(tiny_target), record(tiny_target, system="be brief"), record(tiny_target, "alpha")):
        assert data.shift_of(moved(own, by), found) == by


def test_another_template_is_foreign(tiny_target, found):
    own = record(tiny_target)
    tokenizer = tiny_target.tokenizer
    bare = tokenizer("### Human: hello\n### Assistant:", add_special_tokens=False)["input_ids"]
    assert data.shift_of(dataclasses.replace(own, prompt_ids=bare), found) is None
    # The start alone is wrong: a missing first token is another template as well.
    assert data.shift_of(dataclasses.replace(own, prompt_ids=own.prompt_ids[1:]), found) is None
    rows = [own, moved(own, 2), moved(own, 2), moved(own, -1), dataclasses.replace(own, prompt_ids=bare)]
    bounds, right = data.boundaries(rows, found)
    assert bounds == Boundaries(records=5, shifted=3, foreign=1, shift=2) and right == [own]


def test_a_template_without_system_turns_has_one_start(tiny_target, monkeypatch):
    real = data.render_prompt

    def refusing(tokenizer, messages):
        if messages[0]["role"] == "system":
            raise DataError("no system turns")
        return real(tokenizer, messages)

    monkeypatch.setattr(data, "render_prompt", refusing)
    assert len(data.edges(tiny_target.tokenizer).starts) == 1


def test_shares_of_the_mask():
    rows = [ResponseRecord(str(i), "chat", [5] * 10, [6] * size, "length", 0.0, 0) for i, size in enumerate((10, 30))]
    mask, cut = data.mask_shares(rows, 20)
    assert (mask, cut) == (20 / 40, 20 / 40)
    assert [r.id for r in data.spread(rows * 3, 2)] == ["0", "1"] and data.spread(rows, 9) == rows


# ---- what the target says ---------------------------------------------------------------------------------------


def test_own_answers_agree_and_foreign_ones_do_not(tiny_target):
    own = record(tiny_target)
    ids = list(own.prompt_ids)
    for _ in range(8):
        position = torch.arange(len(ids))[None]
        mask = torch.ones(1, 1, len(ids), len(ids), dtype=torch.bool).tril()
        _, last = tiny_target.hidden(torch.tensor([ids]), position, mask, ())
        ids.append(int(tiny_target.logits(last[0, -1]).argmax()))
    answer = ids[len(own.prompt_ids) :]
    half = torch.zeros(512, dtype=torch.bool)
    half[answer[:4]] = True
    greedy = data.Reading(tiny_target, half).read([dataclasses.replace(own, response_ids=answer)])
    assert greedy.on_policy().agreement == 1.0 and greedy.on_policy().excess is None
    assert greedy.inside == greedy.choices_inside == sum(token in answer[:4] for token in answer)
    foreign = [7 if token != 7 else 8 for token in answer]
    spoilt = data.Reading(tiny_target, half).read([dataclasses.replace(own, response_ids=foreign)]).on_policy()
    assert spoilt.agreement == 0.0 and spoilt.nll > greedy.on_policy().nll and spoilt.tokens == 8
    assert data.Reading(tiny_target, half).on_policy() is None


def test_sampled_answers_cost_their_entropy(tiny_target):
    own = dataclasses.replace(record(tiny_target), response_ids=[7], temperature=2.0)
    ids = torch.tensor([own.prompt_ids])
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    _, last = tiny_target.hidden(ids, torch.arange(ids.shape[1])[None], mask, ())
    p = torch.softmax(tiny_target.logits(last[0, -1]) / 2.0, -1)
    scores = data.Reading(tiny_target, torch.ones(512, dtype=torch.bool)).read([own]).on_policy()
    assert scores.agreement is None and scores.nll == pytest.approx(-math.log(p[7]), rel=1e-5)
    assert scores.excess == pytest.approx(-math.log(p[7]) + float((p * p.log()).sum()), rel=1e-4)


def test_an_id_the_target_lacks_is_named(tiny_target):
    own = dataclasses.replace(record(tiny_target), response_ids=[512])
    with pytest.raises(DataError, match="record hello: token id 512 is outside the target's vocabulary of 512"):
        data.Reading(tiny_target, torch.ones(512, dtype=torch.bool)).read([own])


# ---- what the drafter says --------------------------------------------------------------------------------------


def test_a_restricted_layout_drafts_after_these_tokens_alone(tiny_target):
    own = record(tiny_target, answer=tuple(range(40, 60)))
    batch = collate([own], [(0,)], len(own.prompt_ids) + 20)
    layout = make_layout(batch, 3)
    at = len(own.prompt_ids)
    # The last root has one token after it: room for a first draft, none for a second.
    roots = [at + 2, at + 9, at + 18]
    small = data.restricted(layout, roots)
    assert small.counts() == [3, 2, 2]
    for j, step in enumerate(small.steps):
        # A draft at depth j + 1 after root r reads token r + j and is judged by token r + j + 1.
        kept = roots[: len(step.tokens)]
        assert step.tokens.tolist() == [int(batch.ids[0, r + j]) for r in kept]
        assert (layout.teacher[step.teacher] + 1).tolist() == [r + j + 1 for r in kept]
        assert step.position_ids.tolist() == [r - 1 + j for r in kept]
        assert [(s.q_start, s.q_end) for s in step.segments] == [(0, len(kept))]


def test_the_numbers_of_roots_add_up_to_those_of_all(tiny_target):
    drafter = build_drafter(tiny_target)
    own = record(tiny_target, answer=tuple(range(40, 60)))
    batch = collate([own], [(0,)], len(own.prompt_ids) + 20)
    layout = make_layout(batch, 3)
    features = OnlineFeatures(tiny_target, TAPS, drafter.t2d, torch.float32)(batch, layout)
    graph = drafter.training_graph(Eagle3Config(draft_vocab_size=128, ttt_steps=3), tiny_target).eval()

    def stats(roots) -> torch.Tensor:
        return graph(data.restricted(layout, roots), features)[1]

    # The first draft the layout knows is that of the answer's first token, after the prompt's last.
    roots = list(range(len(own.prompt_ids) - 1, len(own.prompt_ids) + 19))
    with torch.no_grad():
        whole = graph(layout, features)[1]
        assert stats(roots).equal(whole) and whole[0].min() > 0
        torch.testing.assert_close(stats(roots[::2]) + stats(roots[1::2]), whole)
        assert stats([]).equal(torch.zeros(4, 3))


def test_teacher_forcing_reads_answers_and_leaves_the_drafter_alone(tiny_target, monkeypatch):
    drafter = build_drafter(tiny_target)
    monkeypatch.setattr(Eagle3Drafter, "training_graph", lambda self, cfg, target: Counting())
    own = [record(tiny_target, text, tuple(range(40, 40 + size))) for text, size in (("hello", 4), ("more", 6))]
    cfg = Eagle3Config(draft_vocab_size=128, ttt_steps=2)
    # Of 10 first drafts and 8 second ones every other is right.
    forced = data.teacher_forced(drafter, tiny_target, TAPS, own, cfg, 2)
    assert forced == Forced([0.5, 0.5], [0.25, 0.25]) and forced.tau == 1.5
    some = data.teacher_forced(drafter, tiny_target, TAPS, own, cfg, 2, {"hello": [], "more": []})
    assert some == Forced([0.0, 0.0], [0.0, 0.0])
    assert drafter.training and drafter.lm_head.weight.requires_grad


class Counting(torch.nn.Module):
    """A training graph by which half the drafts are right, and a quarter are after right ones."""

    def forward(self, layout, features):
        asked = torch.tensor(layout.counts(), dtype=torch.float32)
        return torch.zeros(()), torch.stack((asked, asked / 2, asked / 4, asked))


# ---- how learning went ------------------------------------------------------------------------------------------


def log_line(step: int, **values: float) -> dict:
    return {"step": step, **{name.replace("__", "/"): value for name, value in values.items()}}


def test_the_curve_is_fitted_to_tau_where_it_was_measured_often():
    rows = [log_line(s, eval__acceptance_length=1.0 + 0.1 * math.log(100 * s)) for s in (1, 30, 50, 70, 100)]
    rows += [log_line(s, train__acc_0=0.9, train__ttt_steps=1) for s in range(1, 100)]
    curve = data.learning_curve(rows, 100.0, tau=2.0)
    # Step 1 lies in the warming-up fifth.
    assert (curve.metric, curve.points, curve.tokens) == ("eval/acceptance_length", 4, 10_000)
    assert (curve.a, curve.b) == (pytest.approx(1.0), pytest.approx(0.1))
    assert curve.gain == pytest.approx(0.1 * math.log(2))


def test_else_to_accuracy_at_full_depth_whose_rise_has_an_end():
    rows = [log_line(s, train__acc_0=0.1, train__ttt_steps=1) for s in range(1, 50)]
    rows += [log_line(s, train__acc_0=0.2 + 0.05 * math.log(10 * s), train__ttt_steps=2) for s in range(50, 101, 5)]
    curve = data.learning_curve(rows, 10.0, tau=2.0)
    now = 0.2 + 0.05 * math.log(1000)
    assert (curve.metric, curve.points) == ("train/acc_0", 11)
    assert curve.gain == pytest.approx(0.05 * math.log(2) / now)
    steep = [log_line(s, train__acc_0=0.9 + 0.09 * math.log(s / 100), train__ttt_steps=2) for s in range(50, 101, 5)]
    assert data.learning_curve(steep, 1.0, tau=2.0).gain == pytest.approx(0.09 * math.log(2) / 0.9)
    full = [log_line(s, train__acc_0=0.99 + 0.09 * math.log(s / 100), train__ttt_steps=2) for s in range(50, 101, 5)]
    assert data.learning_curve(full, 1.0, tau=2.0).gain == pytest.approx(0.01 / 0.99)


def test_too_few_points_are_no_curve(tmp_path):
    assert data.learning_curve([log_line(9, train__acc_0=0.5, train__ttt_steps=1)], 10.0, 2.0) is None
    assert data.learning_curve([], 10.0, 2.0) is None
    assert data.read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')  # killed while writing
    assert data.read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]


# ---- settings of a run ------------------------------------------------------------------------------------------


def test_a_runs_settings_come_back_as_they_were(tmp_path):
    from drafters.cli import save
    from tests.helpers import settings

    run = settings("train", "target=tiny-random", "data=magpie", "experiment=tiny", f"output_dir={tmp_path}")
    save(run)
    again = read_run(tmp_path)
    assert again == run and type(again.data) is type(run.data) and again.target.random == run.target.random
    with pytest.raises(ConfigError, match="is fixed"):
        again.resume = "never"


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config.yaml is missing: .* is not the folder of a train.py run"):
        read_run(tmp_path)
    (tmp_path / "config.yaml").write_text("mode: eval\n")
    with pytest.raises(ConfigError, match="is not what this version of train.py writes"):
        read_run(tmp_path)
    (tmp_path / "config.yaml").write_text("drafter: {family: eagle3, wings: 2}\ndata: {source: builtin}\n")
    with pytest.raises(ConfigError, match="wings"):
        read_run(tmp_path)
