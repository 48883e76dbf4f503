"""mode=compare: the same prompts for all, facts of each, one table; wrong lists answered before anything runs."""

from __future__ import annotations

import dataclasses
import functools
import json
import struct
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import runtime.contest as contests
from drafters.config import EvalConfig, RuntimeConfig, SamplingConfig, ServedDrafter, ServeRun, TargetConfig
from drafters.errors import ContractError
from drafters.export.native import export_drafter
from drafters.generation import record_seed
from drafters.training_facts import TRAINING_NAME, TrainingFacts
from runtime import Engine, SamplingParams, picture_compare
from runtime.compare import EXTRA_KEYS, cells, compare, labels, markdown
from runtime.footprint import described, memory_bytes
from runtime.identity import LosslessError
from runtime.report import KEYS
from tests.drafters.export_setup import SHAPE, build_drafter, describe, edit_json
from tests.helpers import complaint, settings
from tests.runtime.oracle import NEW, PROMPTS
from tests.runtime.test_evaluate import accept_blindly

FACTS = TrainingFacts(100, 100, 604_800, 400, 51_200, 20.5, 21.0, 1, 1)


def make_export(target, dest, beside=None, **shape):
    drafter = build_drafter(target, dataclasses.replace(SHAPE, **shape))
    contract = describe(drafter, target)
    return export_drafter(drafter, target, contract, dest, command="python train.py", beside=beside)


@pytest.fixture(scope="module")
def folders(tiny_target, tmp_path_factory):
    """An export with facts under runs/one/export, an older one without, of twice the MLP, under runs/two/export."""
    base = tmp_path_factory.mktemp("runs")
    make_export(tiny_target, base / "one" / "export", {TRAINING_NAME: FACTS.to_json()})
    make_export(tiny_target, base / "two" / "export", intermediate_size=192)
    return base


def comparison(target, out, *drafters: str, count: int = 1, **changes) -> ServeRun:
    """Settings of a comparison on the first `count` prompts; changes: to what is measured."""
    questions = out.parent / "questions.jsonl"
    rows = [{"id": p.id, "category": p.category, "messages": list(p.messages)} for p in PROMPTS[:count]]
    questions.write_text("\n".join(map(json.dumps, rows)))
    changes = {"compare_transformers": False} | changes
    return ServeRun(
        target=TargetConfig(name="tiny", path=str(target), dtype="float32", device="cpu"),
        drafter=ServedDrafter(None),
        runtime=RuntimeConfig(num_draft_tokens=8, depth=3),
        eval=EvalConfig(prompts=str(questions), max_new_tokens=NEW, **changes),
        sampling=SamplingConfig(),
        mode="compare",
        drafters=list(drafters),
        output_dir=str(out),
    )


@pytest.fixture
def serve_run(tiny_folder, tmp_path):
    return functools.partial(comparison, tiny_folder, tmp_path / "out")


@pytest.fixture(scope="module")
def compared(tiny_folder, folders, tmp_path_factory):
    """One comparison of four drafters on three prompts: entries, folder, printed text, who answered what, loads."""
    out = tmp_path_factory.mktemp("compared") / "out"
    paths = [str(folders / "one" / "export"), "ngram", f"{folders / 'two' / 'export'}+suffix", "none"]
    run = comparison(tiny_folder, out, *paths, count=3, compare_transformers=True)
    console = Console(record=True, width=220)
    calls, loads = [], []
    answer, load = contests._answer, contests.Target.load

    def record(name, *args):
        calls.append((name, list(args[1])))
        answer(name, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contests, "_answer", record)
        patch.setattr("runtime.compare.Target.load", lambda cfg: loads.append(1) or load(cfg))
        entries = compare(run, console)
    return SimpleNamespace(entries=entries, out=out, text=console.export_text(), calls=calls, loads=loads)


# ---- what it leaves ---------------------------------------------------------------------------------------------


def test_entries_hold_a_report_and_the_facts(compared):
    entries = compared.entries
    assert all(set(entry) == {*KEYS, *EXTRA_KEYS} for entry in entries)
    assert [entry["name"] for entry in entries] == ["one", "ngram", "two+suffix", "none"]
    assert [entry["train_tokens"] for entry in entries] == [604_800, 0, None, 0]
    assert [entry["train_minutes"] for entry in entries] == [20.5, 0, None, 0]
    assert [(entry["identical"], entry["prompts"]) for entry in entries] == [(3, 3)] * 4
    assert len({entry["plain_tokens_per_s"] for entry in entries}) == 1  # one plain run for all
    assert entries[3]["acceptance_length"] == entries[3]["acceptance_length_t1"] == 1.0
    assert [entry["temperature"] for entry in entries] == [0.0] * 4
    assert entries[0]["draft_share"] == entries[0]["time_share"]["draft"] > 0


def test_files_and_table_show_them(compared):
    entries, out = compared.entries, compared.out
    assert json.loads((out / "compare.json").read_text()) == entries
    assert "604,800" in compared.text and "not recorded" in compared.text and compared.text.count("3/3") == 4
    table = (out / "compare.md").read_text()
    row = f"| {' | '.join(cells(entries[0]))} |"
    assert [line for line in table.splitlines() if line.startswith("| one |")] == [row]
    assert table.count("\n| ") == 6 and table == markdown(entries)
    data = (out / "compare.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">I", data[16:20]) == (1500,)


def test_all_take_turns_prompt_by_prompt_and_the_target_is_loaded_once(compared):
    names = ["one", "ngram", "two+suffix", "none", "plain", "transformers"]
    turns = [names[turn:] + names[:turn] for turn in range(3)]
    assert compared.calls == [(name, [number]) for number, turn in enumerate(turns) for name in turn]
    assert len(compared.loads) == 1


def test_tau_at_temperature_one_is_the_engines_own(compared, folders, tiny_target):
    engine = Engine.load(tiny_target, str(folders / "one" / "export"), num_draft_tokens=8, depth=3)
    params = [SamplingParams(NEW, temperature=1.0, seed=record_seed(0, p.id)) for p in PROMPTS]
    results = engine.generate([list(p.messages) for p in PROMPTS], params)
    rounds, emitted = (sum(getattr(r.stats, name) for r in results) for name in ("rounds", "emitted"))
    assert compared.entries[0]["acceptance_length_t1"] == emitted / rounds
    assert compared.entries[0]["acceptance_length"] != emitted / rounds


def test_transformers_and_the_check_can_be_left_out(serve_run):
    console = Console(record=True, width=220)
    [entry] = compare(serve_run("ngram", check_identity=False), console)
    assert (entry["speedup_vs_transformers"], entry["identical"]) == (None, None)
    text = console.export_text()
    assert "not measured" in text and "not checked" in text


def test_a_text_that_differs_is_shown_written_and_raised_by_name(serve_run, monkeypatch, tmp_path):
    monkeypatch.setattr("runtime.engine.verify", accept_blindly)
    with pytest.raises(LosslessError, match=r"^random: lossless check failed: 1 of 1 answers"):
        compare(serve_run("none", "random"), Console(record=True))
    entries = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [entry["identical"] for entry in entries] == [1, 0]
    assert "| 0/1 |" in (tmp_path / "out" / "compare.md").read_text()


def test_an_export_for_another_target_is_named(serve_run, tmp_path, tiny_target):
    folder = make_export(tiny_target, tmp_path / "other" / "export")
    edit_json(folder, "contract.json", target_weights_sha256="0" * 64)
    with pytest.raises(ContractError, match=r"other/export/contract\.json: target_weights_sha256"):
        compare(serve_run("ngram", str(folder)), Console(record=True))


# ---- names ------------------------------------------------------------------------------------------------------


def test_names_are_short_where_they_can_be(folders, tmp_path, monkeypatch):
    one, two = str(folders / "one" / "export"), str(folders / "two" / "export")
    assert labels([one, two, f"{one}+ngram", "suffix"]) == ["one", "two", "one+ngram", "suffix"]
    monkeypatch.chdir(tmp_path)
    for name in ("a/x/export", "b/x/export", "plain"):
        (tmp_path / name).mkdir(parents=True)
    assert labels(["a/x/export", "b/x/export"]) == ["a/x/export", "b/x/export"]
    assert labels(["plain", "none"]) == ["./plain", "none"]  # not to be taken for plain decoding


# ---- what a drafter costs ---------------------------------------------------------------------------------------


def test_weights_and_bytes_of_a_trained_drafter(tiny_folder, folders):
    from drafters.target import Target

    target = Target.load(TargetConfig(name="tiny", path=str(tiny_folder), dtype="float32", device="cpu"))
    proposer = Engine.load(target, str(folders / "one" / "export")).proposer
    drafter = build_drafter(target)
    own = sum(p.numel() for p in drafter.parameters())
    assert proposer.weights == own
    # bf16 values laid out as fp16: two bytes each, but for norms (fp32) and the vocabulary's two tables.
    norms = sum(p.numel() for p in drafter.parameters() if p.dim() == 1)
    tables = 128 * 8 + 512
    rest = memory_bytes(proposer, target) - (2 * (own - norms) + 4 * norms + tables)
    assert 0 <= rest < 1024  # rotary frequencies and the norms' eps
    both = Engine.load(target, f"{folders / 'one' / 'export'}+ngram").proposer
    assert (both.weights, memory_bytes(both, target)) == (own, memory_bytes(proposer, target))
    lookup = Engine.load(target, "suffix").proposer
    assert (lookup.weights, memory_bytes(lookup, target)) == (0, 0)


def test_a_small_model_counts_whole(tiny_target, tiny_folder):
    proposer = Engine.load(tiny_target, f"small:{tiny_folder}").proposer
    own = sum(p.numel() for p in torch.nn.ModuleList([_fresh(tiny_folder)]).parameters())
    assert proposer.weights == own and memory_bytes(proposer, tiny_target) > own


def _fresh(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_two_sizes_of_one_family_are_timed_apart(tiny_target, folders):
    names = [described(Engine.load(tiny_target, str(folders / n / "export")).proposer) for n in ("one", "two")]
    assert names[0] != names[1] and all(name.startswith("eagle3 of ") for name in names)
    assert described(Engine.load(tiny_target, "ngram").proposer) == "ngram"


# ---- the picture ------------------------------------------------------------------------------------------------


def entry(name: str, **changes) -> dict:
    found = {
        "name": name, "target": "tiny", "prompts": 3, "dtype": "float32", "speedup": 1.5, "tokens_per_s": 20.0,
        "acceptance_length": 2.0, "acceptance_length_t1": 1.8, "acceptance_at": [0.5, 0.25],
        "machine": {"cpu": "a CPU", "threads": 1, "device": "cpu"},
    }  # fmt: skip
    return found | changes


def test_picture_shows_the_numbers():
    entries = [entry("one"), entry("two", speedup=0.5, acceptance_at=[]), entry("three")]
    speed, tau, depths = picture_compare.draw(entries).axes
    assert [bar.get_width() for bar in speed.patches] == [1.5, 0.5, 1.5]
    assert [text.get_text() for text in speed.get_yticklabels()] == ["one", "two", "three"]
    assert len({bar.get_facecolor() for bar in speed.patches}) == 2  # slower than plain decoding stands out
    assert [bar.get_width() for bar in tau.patches] == [2.0] * 3 + [1.8] * 3
    assert [line.get_label() for line in depths.lines] == ["one", "three"]
    assert list(depths.lines[0].get_ydata()) == [50.0, 25.0]
    _, _, nothing = picture_compare.draw([entry("none", acceptance_at=[])]).axes
    assert [text.get_text() for text in nothing.texts] == ["nothing was drafted"]


# ---- settings ---------------------------------------------------------------------------------------------------


def test_a_list_is_accepted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "A").mkdir()
    run = settings("serve", "mode=compare", "drafters=[A,A+suffix,ngram,none]")
    assert run.drafters == ["A", "A+suffix", "ngram", "none"]


@pytest.mark.parametrize(
    ("overrides", "answer"),
    [
        (("mode=compare",), "mode=compare needs drafters, but drafters is empty. Set drafters=[A,B,...]"),
        (("mode=compare", "drafters=[]"), "mode=compare needs drafters, but drafters is empty."),
        (("drafters=[ngram]",), r"drafters=['ngram'] is read by mode=compare only, but mode=eval. Set mode=compare"),
        (("mode=compare", "drafters=[ngram,nowhere]"), "drafters=nowhere: 'nowhere' is not a drafter: there is no"),
        (("mode=compare", "drafters=[A,ngram,./A]"), "drafters=['A', 'ngram', './A'] names ./A twice. Name each"),
        (("mode=compare", "drafters=[ngram]", "drafter.path=ngram"), "drafter.path=ngram is not read by mode=compare."),
        (("mode=compare", "drafters=[ngram]", "sampling.temperature=1"), "sampling.temperature=1.0: mode=compare meas"),
        (("mode=compare", "drafters=[ngram]", "verification=rejection"), "verification=rejection: mode=compare compar"),
        (("mode=compare", "drafters=ngram"), "drafters=ngram: must be a list, each entry text."),
        (("mode=compair",), "mode=compair: must be one of eval, compare, generate, chat, import."),
    ],
)
def test_wrong_lists_are_answered(overrides, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "A").mkdir()
    assert complaint("serve", *overrides).startswith(answer)
