"""doctor=FOLDER on runs with a planted fault: it is named first, and a sound run has none of them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from drafters.config import FAMILIES, BuiltinData, EvalConfig, RuntimeConfig
from drafters.errors import ArtifactError, ConfigError, ContractError
from drafters.export.native import export_drafter
from drafters.target import Target
from drafters.trainer import BEST
from drafters.training_facts import TRAINING_NAME, TrainingFacts
from runtime import diagnosis, subject
from runtime.diagnosis import run_doctor
from runtime.pipeline import held_out_prompts
from runtime.proposers.eagle import EagleProposer
from tests.drafters.test_doctor import HEALTHY
from tests.helpers import complaint
from tests.runtime import doctor_setup
from tests.runtime.doctor_setup import QUESTIONS, answers, train_run, write_answers

PLANTED = {"off_policy_data", "wrong_template", "small_draft_vocabulary", "shifted_mask", "too_little_data"}
ASKED = [question for number, question in enumerate(QUESTIONS) if number % 100 != 5][::7]


@pytest.fixture(autouse=True)
def _threads_as_they_are(monkeypatch):
    monkeypatch.setattr(diagnosis, "set_threads", lambda requested: 1)


@pytest.fixture(scope="module")
def calm(tiny_folder, tmp_path_factory):
    """A target that a small drafter learns quickly: its settings, itself, and its answers to ASKED."""
    config = doctor_setup.calm_target(tiny_folder, tmp_path_factory.mktemp("calm") / "calm")
    target = Target.load(config)
    return SimpleNamespace(config=config, target=target, answers=answers(target, ASKED))


@pytest.fixture(scope="module")
def sound(calm, tmp_path_factory):
    """A run without a fault."""
    folder = tmp_path_factory.mktemp("sound")
    return train_run(doctor_setup.settings(calm.config, folder, steps=40), calm.target, calm.answers)


@pytest.fixture
def examine(calm, tmp_path):
    """Train a few steps on records and let the doctor look; returns the causes it found, in order."""

    def run(records, steps: int = 4, **drafter) -> list[str]:
        settings = doctor_setup.settings(calm.config, tmp_path / "run", steps, **drafter)
        findings = run_doctor(train_run(settings, calm.target, records), Console(quiet=True))
        return [finding.cause for finding in findings]

    return run


def shifted(records, by: int):
    rows = [(record, record.prompt_ids + record.response_ids, len(record.prompt_ids) + by) for record in records]
    return [dataclasses.replace(record, prompt_ids=ids[:at], response_ids=ids[at:]) for record, ids, at in rows]


# ---- planted faults ---------------------------------------------------------------------------------------------


def test_a_sound_run_has_none_of_the_faults(sound, calm):
    console = Console(record=True, width=200)
    findings = run_doctor(sound, console)
    assert not {finding.cause for finding in findings} & (PLANTED | {"train_serve_gap"})
    report = json.loads((Path(sound.doctor) / "doctor.json").read_text())
    assert report["findings"] == [dataclasses.asdict(finding) for finding in findings]
    assert all({"cause", "evidence", "advice"} <= set(finding) for finding in report["findings"])
    measured = report["measures"]
    assert measured["on_policy"]["agreement"] > 0.99 and measured["boundaries"] == {
        "records": len(ASKED), "shifted": 0, "foreign": 0, "shift": None
    }  # fmt: skip
    # The same rounds, drafted by the runtime and by the training graph: the same drafts, hit by hit.
    assert measured["served"]["chain_at"] == measured["served"]["forced_at"] != [0.0] * 3
    assert measured["served"]["tau"] > 1.5 and measured["curve"]["metric"] == "train/acc_0"
    assert set(measured["served"]["by_category"]) == {"a", "b"}
    text = console.export_text()
    assert f"tau {measured['served']['tau']:.2f} at temperature 0" in text and "doctor.json" in text


def test_off_policy_answers_are_named_first(examine, calm):
    generator = torch.Generator().manual_seed(0)
    spoilt = [
        dataclasses.replace(r, response_ids=torch.randint(3, 500, (24,), generator=generator).tolist())
        for r in calm.answers[:24]
    ]
    assert examine(spoilt)[0] == "off_policy_data"


def test_another_template_is_named_first(examine, calm):
    tokenizer = calm.target.tokenizer

    def rendered(question: str) -> list[int]:
        return tokenizer(f"### Human: {question}\n### Assistant:", add_special_tokens=False)["input_ids"]

    assert examine(answers(calm.target, ASKED[:24], rendered))[0] == "wrong_template"


def test_a_tiny_draft_vocabulary_is_named_first(examine, calm):
    assert examine(calm.answers[:24], draft_vocab_size=12)[0] == "small_draft_vocabulary"


def test_a_shifted_mask_is_named_first(examine, calm):
    causes = examine(shifted(calm.answers[:24], -3))
    # Header tokens among the answers' are no sign of another author.
    assert causes[0] == "shifted_mask" and "off_policy_data" not in causes


def test_too_little_data_is_named_first(examine, calm):
    assert examine(calm.answers[:3], steps=30)[0] == "too_little_data"


def test_features_that_differ_in_serving_are_named_first(sound, monkeypatch):
    real = EagleProposer.commit
    monkeypatch.setattr(
        EagleProposer, "commit", lambda self, row, tokens, taps: real(self, row, tokens, taps.roll(1, -1))
    )
    findings = run_doctor(sound, Console(quiet=True))
    assert findings[0].cause == "train_serve_gap"
    assert not {finding.cause for finding in findings} & PLANTED


@pytest.mark.parametrize("family", [name for name in FAMILIES["drafter"] if name != "eagle3"])  # which is above
def test_every_family_drafts_in_serving_what_its_training_graph_says(family, calm, tmp_path):
    run = doctor_setup.settings(calm.config, tmp_path / "run", steps=6)
    drafter = FAMILIES["drafter"][family](draft_vocab_size=512)
    trained = train_run(dataclasses.replace(run, drafter=drafter), calm.target, calm.answers[::2])
    opened = subject.open_subject(tmp_path / "run", trained)
    served, _ = diagnosis.serve(opened, held_out_prompts(trained))
    assert served.chain_at == served.forced_at and served.chain_at[0] > 0


# ---- what is looked at ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def export(sound, calm, tmp_path_factory):
    """The sound run's last checkpoint as an export, with training.json and the run's log beside it."""
    opened = subject.open_subject(Path(sound.doctor), sound)
    facts = TrainingFacts(40, 40, 12_000, 54, 1300, 1.0, 1.0, 1, 1)
    folder = export_drafter(
        opened.drafter, calm.target, opened.contract, tmp_path_factory.mktemp("e") / "export",
        command="python train.py", beside={TRAINING_NAME: facts.to_json()},
    )  # fmt: skip
    log = Path(sound.doctor) / "metrics.jsonl"
    (folder / "metrics.jsonl").write_text(log.read_text())
    return folder


def test_an_export_is_examined_with_the_answers_the_command_line_names(sound, export, tmp_path):
    run = dataclasses.replace(
        sound,
        doctor=str(export),
        data=BuiltinData(responses=f"{sound.output_dir}/answers"),
        output_dir=str(tmp_path / "out"),
    )
    findings = run_doctor(run, Console(quiet=True))
    assert not {finding.cause for finding in findings} & PLANTED
    report = json.loads((tmp_path / "out" / "doctor.json").read_text())
    assert not (export / "doctor.json").exists()
    assert report["measures"]["curve"]["tokens"] == 12_000


def test_an_export_alone_does_not_say_its_answers(sound, export):
    run = dataclasses.replace(sound, doctor=str(export), data=BuiltinData())
    with pytest.raises(ConfigError, match="does not say which answers it was trained on. Set data.responses"):
        subject.open_subject(export, run)


def test_an_export_for_another_target_is_refused(sound, export, tiny_folder):
    other = dataclasses.replace(sound.target, path=str(tiny_folder))
    with pytest.raises(ContractError, match="target_weights_sha256"):
        subject.open_subject(export, dataclasses.replace(sound, doctor=str(export), target=other))


def test_the_command_line_says_other_answers_than_the_run(sound, calm, tmp_path):
    write_answers(calm.answers[:5], calm.target, tmp_path / "fewer")
    run = dataclasses.replace(sound, data=BuiltinData(responses=str(tmp_path / "fewer")))
    opened = subject.open_subject(Path(sound.doctor), run)
    assert len(opened.records) == 5 and opened.run.trainer == sound.trainer


def test_the_target_is_the_runs_but_where_the_command_line_names_one(sound, tiny_folder, monkeypatch):
    other = dataclasses.replace(sound, target=dataclasses.replace(sound.target, path=str(tiny_folder)))
    folder = Path(sound.doctor)
    assert subject.open_subject(folder, other).base.folder == Path(sound.target.path)
    fake = SimpleNamespace(
        initialized=lambda: True,
        get=lambda: SimpleNamespace(overrides=SimpleNamespace(task=["target=custom", "target.path=x"])),
    )
    monkeypatch.setattr(subject, "HydraConfig", fake)
    with pytest.raises(ContractError, match="target_weights_sha256"):
        subject.open_subject(folder, other)


def test_of_runtime_and_eval_what_is_typed_replaces_what_the_run_had(sound, monkeypatch):
    now = dataclasses.replace(sound, runtime=RuntimeConfig(depth=9, top_k=7), eval=EvalConfig(num_prompts=3))
    for typed, depth, top_k in (([], 2, 2), (["runtime.depth=9"], 9, 2), (["runtime=default"], 9, 7)):
        task = [*typed, "eval.num_prompts=3"]
        fake = SimpleNamespace(
            initialized=lambda: True, get=lambda t=task: SimpleNamespace(overrides=SimpleNamespace(task=t))
        )
        monkeypatch.setattr(subject, "HydraConfig", fake)
        found = subject._said("runtime", sound, now)
        assert (found.depth, found.top_k) == (depth, top_k)
        assert subject._said("eval", sound, now) == dataclasses.replace(sound.eval, num_prompts=3)


def test_the_drafter_is_the_export_else_the_best_else_the_last(tmp_path):
    with pytest.raises(ConfigError, match="neither an export nor a checkpoint"):
        subject._weights_in(tmp_path)
    for name in ("checkpoints/last", "checkpoints/best", "export"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "manifest.json").write_text("{}")
        assert subject._weights_in(tmp_path) == tmp_path / name


def test_a_damaged_checkpoint_is_named(sound, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(sound.doctor, copy)
    weights = copy / "checkpoints" / BEST / "drafter.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(ArtifactError, match="drafter.safetensors"):
        subject.open_subject(copy, dataclasses.replace(sound, doctor=str(copy)))


def test_a_clean_bill_says_so():
    console = Console(record=True, width=200)
    diagnosis.show(HEALTHY, [], console)
    text = console.export_text()
    assert "nothing found that costs tau" in text and "chat 2.10, code 1.90" in text and "60.0%, 30.0%" in text


def test_new_answers_are_compared_with_their_like(calm):
    some, others = calm.answers[:4], calm.answers[4:12]
    assert diagnosis._alike(some, others, some[:1], 5) == (some, others)
    cut, new = diagnosis._alike(some, others[:7], some[:1], 5)
    assert [record.response_ids for record in cut] == [record.response_ids[:5] for record in some]
    assert new == some[:1]


def test_long_answers_fall_into_buckets():
    assert [diagnosis._bucket(n) for n in (1, 32, 33, 128, 129)] == [
        "up to 32 tokens", "up to 32 tokens", "up to 64 tokens", "up to 128 tokens", "over 128 tokens"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "answer"),
    [
        (("doctor=nowhere",), "doctor=nowhere: there is no such folder"),
        (("doctor=.", "plan=true"), "plan=true and doctor=. are two different jobs. Set one of them."),
    ],
)
def test_wrong_settings_are_answered(overrides, answer):
    assert complaint("train", *overrides).startswith(answer)
