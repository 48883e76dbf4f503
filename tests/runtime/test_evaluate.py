"""Evaluation on the tiny target: counters against numbers worked out by hand, and no test of speed itself."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest
import torch
from rich.console import Console

import runtime.contest as module
from drafters.config import (
    EvalConfig,
    RuntimeConfig,
    SamplingConfig,
    ServedDrafter,
    ServeRun,
    TargetConfig,
)
from drafters.corpus import Prompt
from drafters.errors import ConfigError, DataError
from drafters.target import Target
from runtime import Engine, SamplingParams
from runtime.evaluate import eval_prompts, evaluate, measure, quick_acceptance
from runtime.identity import IdentityCheck, LosslessError
from runtime.metrics import Stats
from runtime.tree import DraftTree
from runtime.verify import Verification
from tests.runtime.oracle import NEW, PROMPTS, Oracle, random_drafter

FAST = EvalConfig(max_new_tokens=NEW, compare_transformers=False)
RUNTIME = RuntimeConfig(num_draft_tokens=16)  # depth 5


@pytest.fixture(scope="module")
def plain_answers(tiny_target):
    engine = Engine.load(tiny_target, "none")
    answers = engine.generate([list(p.messages) for p in PROMPTS], SamplingParams(NEW))
    assert [len(a.token_ids) for a in answers] == [NEW] * 3  # the sums below count on it
    return answers


@pytest.fixture
def oracle(plain_answers):
    def make(known: int = 3, wrong_at: int | None = None) -> Oracle:
        return Oracle(plain_answers, known, wrong_at)

    return make


@pytest.fixture
def own_target(tiny_folder):
    """A target no other test has laid out for decoding."""
    return Target.load(TargetConfig(name="tiny", path=str(tiny_folder), dtype="float32", device="cpu"))


def run(target, drafter, runtime=RUNTIME, settings=FAST, sampling=None, prompts=PROMPTS):
    return measure(target, drafter, prompts, runtime, settings, sampling or SamplingConfig())


# ---- counters ---------------------------------------------------------------------------------------------------


def test_right_drafts_are_counted_as_worked_out_by_hand(tiny_target, oracle):
    # 9 tokens after the prompt: a round of 5 drafts + bonus, then 2 drafts (one short of the 3 left) + bonus.
    report = run(tiny_target, oracle(), prompts=PROMPTS[:1])
    counters = {key: report[key] for key in ("rounds", "drafted", "accepted", "emitted")}
    assert counters == {"rounds": 2, "drafted": 7, "accepted": 7, "emitted": 9}
    assert report["acceptance_length"] == 4.5
    assert report["acceptance_at"] == [1.0, 1.0, 0.5, 0.5, 0.5]
    assert (report["identical"], report["prompts"], report["near_ties"]) == (1, 1, 0)
    assert report["drafter"] == "oracle"


def test_drafts_wrong_at_depth_three(tiny_target, oracle):
    # Rounds of 5, 5 and 2 drafts, two accepted each; depths never accepted still show, as zeros.
    report = run(tiny_target, oracle(wrong_at=3), prompts=PROMPTS[:1])
    counters = {key: report[key] for key in ("rounds", "drafted", "accepted", "emitted")}
    assert counters == {"rounds": 3, "drafted": 12, "accepted": 6, "emitted": 9}
    assert report["acceptance_length"] == 3.0
    assert report["acceptance_at"] == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_tau_is_a_sum_over_a_sum(tiny_target, oracle):
    # 9 tokens in 2 rounds and 9 in 9: 18/11, where the mean of both would say 2.75.
    report = run(tiny_target, oracle(known=1), prompts=PROMPTS[:2])
    assert report["acceptance_length"] == 18 / 11
    assert report["acceptance_at"] == [2 / 11, 2 / 11, 1 / 11, 1 / 11, 1 / 11]
    assert [row["acceptance_length"] for row in report["per_prompt"]] == [4.5, 1.0]
    for key in ("rounds", "drafted", "accepted", "emitted"):
        assert report[key] == sum(row[key] for row in report["per_prompt"])


def test_plain_decoding_drafts_nothing(tiny_target):
    report = run(tiny_target, "none")
    assert (report["drafted"], report["acceptance_at"], report["acceptance_length"]) == (0, [], 1.0)
    assert report["drafter"] == "none"


def test_each_prompt_is_described(tiny_target, plain_answers):
    report = run(tiny_target, "ngram")
    rows = report["per_prompt"]
    assert [(row["id"], row["category"]) for row in rows] == [("a", "chat"), ("b", "maths"), ("c", "chat")]
    assert [row["text"] for row in rows] == [answer.text for answer in plain_answers]
    assert [row["tokens"] for row in rows] == [NEW] * 3
    assert [row["identical"] for row in rows] == [True] * 3


@pytest.mark.parametrize("drafter", [random_drafter, lambda: "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_any_drafter_leaves_the_text_alone(tiny_target, drafter, temperature):
    report = run(tiny_target, drafter(), sampling=SamplingConfig(temperature, seed=5))
    assert (report["identical"], report["near_ties"], report["temperature"]) == (3, 0, temperature)


def test_each_prompt_gets_noise_of_its_own(tiny_target):
    twins = [dataclasses.replace(PROMPTS[0], id=name) for name in ("one", "two")]
    rows = run(tiny_target, "none", sampling=SamplingConfig(1.0, seed=5), prompts=twins)["per_prompt"]
    again = run(tiny_target, "none", sampling=SamplingConfig(1.0, seed=6), prompts=twins)["per_prompt"]
    assert len({rows[0]["text"], rows[1]["text"], again[0]["text"], again[1]["text"]}) == 4


def test_a_drafter_under_the_working_folder_is_named_without_the_machines_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert module.shown(tmp_path / "outputs" / "export") == "outputs/export"
    assert module.shown("outputs/export") == "outputs/export"
    assert module.shown("/elsewhere/export") == "/elsewhere/export"
    assert module.shown("ngram") == "ngram"


# ---- where time and drafts went ----------------------------------------------------------------------------------


class Named(Oracle):
    """The oracle with its name on each draft."""

    def propose(self, budgets):
        trees = super().propose(budgets)
        return {
            row: dataclasses.replace(tree, sources=("", *["oracle"] * (len(tree) - 1))) for row, tree in trees.items()
        }


def test_drafts_are_counted_by_size_and_proposer(tiny_target, plain_answers):
    report = run(tiny_target, Named(plain_answers, 3, wrong_at=3), prompts=PROMPTS[:1])
    assert report["chosen_n"] == {"2": 1, "5": 2}
    assert report["by_proposer"] == {"oracle": {"drafted": 12, "accepted": 6}}
    assert report["predicted"] is None  # trees of a fixed size
    assert sum(run(tiny_target, "none")["chosen_n"].values()) == 27


def test_time_is_split_and_given_per_token(tiny_target, plain_answers):
    report = run(tiny_target, Named(plain_answers, 3, None))
    assert list(report["time_share"]) == ["draft", "verify", "sample", "rest"]
    assert sum(report["time_share"].values()) == pytest.approx(1.0)
    assert report["time_share"]["verify"] > 0.2
    latency = report["latency_ms"]
    assert list(latency) == ["p50", "p95", "p99"] and 0 < latency["p50"] <= latency["p95"] <= latency["p99"] < 1e4


def test_the_report_is_what_json_gives_back(tiny_target):
    report = run(tiny_target, "ngram", prompts=PROMPTS[:1])
    assert json.loads(json.dumps(report)) == report


def test_sampling_settings_reach_the_sampler(tiny_target, monkeypatch):
    seen = []
    real = Engine.generate
    monkeypatch.setattr(Engine, "generate", lambda self, ids, params: seen.append(params[0]) or real(self, ids, params))
    sampling = SamplingConfig(0.9, 5, 40, 0.95, 0.05, 1.1, 0.2, 0.3, 4)
    report = measure(tiny_target, "none", PROMPTS[:1], RUNTIME, FAST, sampling, None, "rejection")
    fields = dataclasses.asdict(sampling)
    del fields["seed"]
    assert {name: getattr(seen[-1], name) for name in fields} == fields
    assert (seen[-1].verification, report["verification"]) == ("rejection", "rejection")


@pytest.mark.parametrize(
    ("verification", "temperature", "compared", "lossy"),
    [
        ("coupled", 1.0, True, False),
        ("rejection", 0.0, True, False),
        ("rejection", 1.0, False, False),
        ("typical", 0.0, False, True),
        ("typical", 1.0, False, True),
    ],
)
def test_texts_are_compared_where_the_rule_promises_them(tiny_target, verification, temperature, compared, lossy):
    sampling = SamplingConfig(temperature)
    report = measure(tiny_target, "ngram", PROMPTS[:1], RUNTIME, FAST, sampling, None, verification)
    assert (report["identical"] is not None, report["lossy"]) == (compared, lossy)


def test_sizes_chosen_by_cost_show_what_was_expected(tiny_target, plain_answers, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    runtime = RuntimeConfig(num_draft_tokens="auto")
    report = run(tiny_target, Named(plain_answers, 3, None), runtime=runtime)
    assert (report["identical"], report["predicted"]["got"]) == (3, report["emitted"])
    assert report["predicted"]["expected"] >= report["rounds"]


def test_acceptance_while_training_does_not_depend_on_costs(own_target, oracle, monkeypatch):
    auto, real = RuntimeConfig(num_draft_tokens="auto"), Engine.load
    loads = []
    monkeypatch.setattr(Engine, "load", lambda *args, **kwargs: loads.append(kwargs) or real(*args, **kwargs))
    got = quick_acceptance(oracle(known=1), own_target, PROMPTS[:2], auto, NEW)
    assert got == quick_acceptance(oracle(known=1), own_target, PROMPTS[:2], RUNTIME, NEW)
    assert [kwargs["num_draft_tokens"] for kwargs in loads] == [16, 16]


# ---- speed ------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Lets each timed call last one second."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(module, "perf_counter", lambda: next(ticks))


def test_rates_divide_tokens_by_seconds(tiny_target, oracle, clock):
    report = run(tiny_target, oracle(), settings=EvalConfig(max_new_tokens=NEW))
    rates = ("tokens_per_s", "plain_tokens_per_s", "transformers_tokens_per_s")
    assert [report[key] for key in rates] == [10.0, 10.0, 10.0]
    assert (report["speedup"], report["speedup_vs_transformers"]) == (1.0, 1.0)
    seconds = ("seconds", "plain_seconds", "transformers_seconds")
    assert [row[key] for row in report["per_prompt"] for key in seconds] == [1] * 9


def test_a_group_shares_its_seconds(tiny_target, oracle, clock):
    report = run(tiny_target, oracle(), runtime=RuntimeConfig(num_draft_tokens=16, batch_size=2))
    assert [row["seconds"] for row in report["per_prompt"]] == [0.5, 0.5, 1.0]
    assert report["tokens_per_s"] == 15.0
    assert (report["identical"], report["rounds"]) == (3, 6)


def test_speedup_is_ours_over_the_other(tiny_target, oracle, monkeypatch):
    def seconds(name, run, group, rows, ids, params, real=module._answer):
        real(name, run, group, rows, ids, params)
        for i in group:
            rows[i].seconds[name] = {"ours": 1.0, "plain": 3.0, "transformers": 4.0}[name]

    monkeypatch.setattr(module, "_answer", seconds)
    report = run(tiny_target, oracle(), settings=EvalConfig(max_new_tokens=NEW))
    assert (report["speedup"], report["speedup_vs_transformers"]) == (3.0, 4.0)


def test_contestants_take_turns_at_going_first(tiny_target, monkeypatch):
    calls = []

    def record(name, run, group, rows, ids, params, real=module._answer):
        calls.append((name, list(group)))
        real(name, run, group, rows, ids, params)

    monkeypatch.setattr(module, "_answer", record)
    run(tiny_target, "ngram", settings=EvalConfig(max_new_tokens=2))
    names = [name for name, _ in calls]
    assert names == [
        "ours", "plain", "transformers", "plain", "transformers", "ours", "transformers", "ours", "plain",
    ]  # fmt: skip
    assert [group for _, group in calls] == [[0]] * 3 + [[1]] * 3 + [[2]] * 3


def test_caches_are_made_before_the_clock_runs(tiny_target, monkeypatch):
    from runtime import engine as engines

    made, timed = [], []
    real = engines.TargetRunner
    monkeypatch.setattr(engines, "TargetRunner", lambda *args: made.append(len(timed)) or real(*args))
    answer = module._answer
    monkeypatch.setattr(module, "_answer", lambda *args: timed.append(args[0]) or answer(*args))
    # 231 tokens: a four-token answer fits into a cache of 256 slots, twelve tokens and a tree do not.
    long = Prompt("long", "chat", ({"role": "user", "content": "x" * 212},))
    settings = EvalConfig(max_new_tokens=12, compare_transformers=False)
    run(tiny_target, "ngram", settings=settings, prompts=[PROMPTS[0], long])
    assert made and set(made) == {0} and len(timed) == 4


def test_transformers_can_be_left_out(tiny_target, monkeypatch):
    monkeypatch.setattr(module, "TransformersPeer", lambda target: pytest.fail("loaded all the same"))
    report = run(tiny_target, "ngram")
    assert (report["transformers_tokens_per_s"], report["speedup_vs_transformers"]) == (None, None)
    assert [row["transformers_seconds"] for row in report["per_prompt"]] == [None] * 3


# ---- equality ---------------------------------------------------------------------------------------------------


def accept_blindly(tree: DraftTree, choices: list[int]) -> Verification:
    """A planted bug: every draft is believed."""
    path = tuple(range(len(tree)))
    return Verification(path, choices[path[-1]])


def test_text_that_differs_is_counted_and_logged(tiny_target, oracle, monkeypatch, caplog):
    monkeypatch.setattr("runtime.engine.verify", accept_blindly)
    with caplog.at_level(logging.INFO, "runtime.contest"):
        report = run(tiny_target, oracle(known=2, wrong_at=3))
    assert (report["identical"], report["near_ties"]) == (1, 0)
    assert [row["identical"] for row in report["per_prompt"]] == [False, False, True]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    # The first token is the prompt's, so the third draft is token 3 of the answer.
    assert errors[0].getMessage().startswith("prompt a leaves plain decoding at token 3: ")


def test_near_ties_are_counted_apart(tiny_target, oracle, monkeypatch, caplog):
    monkeypatch.setattr("runtime.engine.verify", accept_blindly)
    monkeypatch.setattr(IdentityCheck, "noise", 1e6)
    with caplog.at_level(logging.INFO, "runtime.contest"):
        report = run(tiny_target, oracle(known=2, wrong_at=3))
    assert (report["identical"], report["near_ties"]) == (1, 2)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_in_half_precision_a_difference_is_a_warning(tiny_folder, oracle, monkeypatch, caplog):
    target = Target.load(TargetConfig(name="tiny", path=str(tiny_folder), dtype="bfloat16", device="cpu"))
    monkeypatch.setattr("runtime.engine.verify", accept_blindly)
    with caplog.at_level(logging.INFO, "runtime.contest"):
        report = run(target, oracle(wrong_at=1), prompts=PROMPTS[:1])
    assert (report["dtype"], report["identical"], report["near_ties"]) == ("bfloat16", 0, 0)
    assert [record.levelname for record in caplog.records if "leaves plain" in record.getMessage()] == ["WARNING"]


def test_equality_is_not_looked_at_unless_asked(tiny_target, oracle, monkeypatch):
    monkeypatch.setattr("runtime.engine.verify", accept_blindly)
    settings = EvalConfig(max_new_tokens=NEW, compare_transformers=False, check_identity=False)
    report = run(tiny_target, oracle(wrong_at=3), settings=settings)
    assert (report["identical"], report["near_ties"]) == (None, None)
    assert [row["identical"] for row in report["per_prompt"]] == [None] * 3


# ---- prompts ----------------------------------------------------------------------------------------------------


def test_prompts_come_from_a_question_file(tmp_path, caplog):
    path = tmp_path / "questions.jsonl"
    lines = [{"question_id": 81, "category": "writing", "turns": ["First?", "Then?"]}, {"prompt": "Second?"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = eval_prompts(EvalConfig(prompts=str(path)))
    assert found[0] == Prompt("81", "writing", ({"role": "user", "content": "First?"},))
    assert len(found) == 2 and not caplog.records
    assert eval_prompts(EvalConfig(prompts=str(path), num_prompts=1)) == found[:1]
    assert eval_prompts(EvalConfig(prompts=str(path), num_prompts=9)) == found
    assert "eval.num_prompts is 9, there are only 2" in caplog.text


def test_without_a_file_all_built_in_held_out_prompts_are_taken():
    import drafters.corpus as corpus

    held_out = corpus._builtin("eval")
    assert eval_prompts(EvalConfig()) == held_out and len(held_out) >= 30
    assert eval_prompts(EvalConfig(num_prompts=2)) == held_out[:2]


def test_a_prompt_too_long_is_refused_before_anything_runs(tiny_target, monkeypatch):
    monkeypatch.setattr(Engine, "generate", lambda *_: pytest.fail("ran"))
    runtime = RuntimeConfig(num_draft_tokens=16, max_length=40)
    with pytest.raises(ConfigError, match=r"prompt 'b' has \d+ tokens and eval.max_new_tokens is 10.*limit of 40"):
        run(tiny_target, "none", runtime=runtime, prompts=[PROMPTS[2], PROMPTS[1]])


def test_no_prompts_is_an_error(tiny_target):
    with pytest.raises(DataError, match="no prompt to evaluate on. Set eval.prompts"):
        run(tiny_target, "none", prompts=[])


# ---- while training ---------------------------------------------------------------------------------------------


def test_quick_acceptance_gives_the_engines_counters(own_target, oracle):
    total = Stats()
    for result in Engine.load(own_target, oracle(known=1)).generate(
        [list(p.messages) for p in PROMPTS[:2]], SamplingParams(NEW)
    ):
        total.add(result.stats)
    got = quick_acceptance(oracle(known=1), own_target, PROMPTS[:2], RUNTIME, NEW)
    assert got == {"acceptance_length": 18 / 11, "acceptance_at": total.acceptance_at, "rounds": 11, "emitted": 18}


def test_quick_acceptance_leaves_target_and_drafter_as_they_were(own_target):
    drafter = random_drafter().train()
    weights = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    modules = dict(own_target.model.named_modules())
    ids = torch.arange(3, 40)[None]
    positions = torch.arange(37)[None]
    mask = torch.ones(1, 1, 37, 37, dtype=torch.bool).tril()
    before = own_target.hidden(ids, positions, mask, (2, 4, 5))
    got = quick_acceptance(drafter, own_target, PROMPTS, RUNTIME, NEW)
    assert got["emitted"] == 27
    after = own_target.hidden(ids, positions, mask, (2, 4, 5))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    now = dict(own_target.model.named_modules())
    assert now.keys() == modules.keys() and all(now[name] is modules[name] for name in now)
    assert own_target.model.config._attn_implementation == "sdpa"
    assert drafter.training and all(parameter.requires_grad for parameter in drafter.parameters())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in drafter.state_dict().items())


def test_quick_acceptance_gives_the_target_back_after_a_failure(own_target, oracle):
    class Broken(Oracle):
        def propose(self, budgets):
            raise RuntimeError("no drafts today")

    modules = dict(own_target.model.named_modules())
    with pytest.raises(RuntimeError, match="no drafts today"):
        quick_acceptance(Broken([], 0, None), own_target, PROMPTS, RUNTIME, NEW)
    now = dict(own_target.model.named_modules())
    assert all(now[name] is modules[name] for name in modules)


# ---- serve.py mode=eval -----------------------------------------------------------------------------------------


@pytest.fixture
def serve_run(tiny_folder, tmp_path):
    questions = tmp_path / "questions.jsonl"
    rows = [{"id": p.id, "category": p.category, "messages": list(p.messages)} for p in PROMPTS]
    questions.write_text("\n".join(map(json.dumps, rows)))
    return ServeRun(
        target=TargetConfig(name="tiny", path=str(tiny_folder), dtype="float32", device="cpu"),
        drafter=ServedDrafter("ngram"),
        runtime=RUNTIME,
        eval=EvalConfig(prompts=str(questions), max_new_tokens=NEW),
        sampling=SamplingConfig(),
        output_dir=str(tmp_path / "out"),
    )


def test_evaluate_leaves_report_and_picture(serve_run, tmp_path):
    console = Console(record=True, width=100)
    report = evaluate(serve_run, console)
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    assert (tmp_path / "out" / "report.png").read_bytes()[:4] == b"\x89PNG"
    assert "identical to plain decoding: 3/3" in console.export_text()
    assert (report["target"], report["drafter"], report["dtype"]) == ("tiny", "ngram", "float32")


def test_a_lossless_failure_is_raised_after_the_report_is_written(serve_run, tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.engine.verify", accept_blindly)
    # Any draft the target would not have made will do; a drafter of constant tokens makes many.
    monkeypatch.setattr(
        "runtime.proposers.ngram.NgramProposer._tree",
        lambda self, text, budget: DraftTree.chain(text.ids[-1], [7] * budget.depth),
    )
    with pytest.raises(LosslessError, match="lossless check failed: 3 of 3 answers") as caught:
        evaluate(serve_run, Console(record=True))
    assert caught.value.exit_code == 3
    assert json.loads((tmp_path / "out" / "report.json").read_text())["identical"] == 0
