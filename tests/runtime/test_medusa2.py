"""Medusa-2 served: an export that tunes its target, and everything that meets it there."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file

from drafters.artifacts import verify_folder
from drafters.config import EvalConfig, RuntimeConfig, SamplingConfig
from drafters.config_drafter import MedusaConfig
from drafters.corpus import ResponseRecord
from drafters.errors import ArtifactError, ConfigError, ContractError, TargetError
from drafters.export import DataSummary, describe_drafter, export_drafter, load_drafter
from drafters.features import BatchInputs
from drafters.models.layout import Features, make_layout
from drafters.responses import ResponseSet
from drafters.target import Target
from runtime import pipeline
from runtime.beginning import make_drafter
from runtime.compare import by_target, compare, conditions
from runtime.custom import outrider_generate
from runtime.discover import choose_drafter
from runtime.engine import Engine
from runtime.evaluate import measure, quick_acceptance
from runtime.forward import TargetRunner
from runtime.loading import tuned_target
from runtime.proposers.heads import HeadsProposer
from runtime.sampling import SamplingParams
from tests.drafters import export_setup
from tests.drafters.test_medusa2 import RECORDS, laid_out, medusa2, wild
from tests.drafters.test_ttt import Labels, pack
from tests.drafters.training_setup import run_settings, run_training
from tests.runtime import oracle
from tests.runtime.conftest import PROMPTS
from tests.runtime.test_compare import comparison

DRIFT = {"records": 2, "positions": 40, "kl": 0.25, "top1_agreement": 0.75}


@pytest.fixture(scope="module")
def fresh(tiny_target, tiny_config) -> Target:
    """A target that no engine has touched, in the same cache."""
    return Target.load(tiny_config)


@pytest.fixture(scope="module")
def drafter(fresh):
    return wild(fresh, medusa2(fresh, num_heads=3), 0.02)


@pytest.fixture(scope="module")
def folder(fresh, drafter, tmp_path_factory) -> Path:
    return write(fresh, drafter, tmp_path_factory.mktemp("medusa2") / "export")


def write(target: Target, drafter, dest: Path) -> Path:
    tuned = drafter.tuned(target)
    contract = describe_drafter(drafter, tuned, taps=(8,), steps=3, max_length=64)
    return export_drafter(drafter, tuned, contract, dest, command="train", beside={"drift.json": DRIFT})


def answers(engine: Engine, tokens: int = 6, temperature: float = 0.0, prompts=PROMPTS[:3]) -> list[list[int]]:
    params = [SamplingParams(tokens, temperature=temperature, seed=i, ignore_eos=True) for i in range(len(prompts))]
    return [result.token_ids for result in engine.generate(prompts, params)]


# ---- the text


@pytest.mark.parametrize(("temperature", "batch_size"), [(0.0, 1), (0.9, 3)])
def test_text_is_the_tuned_targets_plain_text(fresh, folder, drafter, temperature, batch_size):
    engine = Engine.load(fresh, folder, num_draft_tokens=9, depth=3, top_k=3, batch_size=batch_size)
    assert engine.target.title == drafter.tuned(fresh).title and fresh.adapter is None
    # Its factors are in the target: no memory is held for them twice.
    assert not [name for name, _ in engine.proposer.drafter.named_parameters() if "lora" in name] and drafter.lora
    found = answers(engine, temperature=temperature)
    assert found == answers(Engine.load(drafter.tuned(fresh), "none"), temperature=temperature)


def test_the_given_target_and_its_engines_keep_their_text(fresh, folder, tiny_config):
    plain = Engine.load(fresh, "none")
    before = answers(plain)
    other = Engine.load(fresh, folder)
    assert answers(other) != before  # read once more: the first engine had laid the weights out
    assert answers(plain) == before == answers(Engine.load(Target.load(tiny_config), "none"))


def test_its_state_is_what_the_text_alone_gives(fresh, folder):
    assert answers(Engine.load(fresh, folder, num_draft_tokens=6, depth=3, top_k=2, debug=True), 6)


def sharp_target(config) -> Target:
    """The tiny target with logits 25 times as large: the same greedy text, said with conviction."""
    target = Target.load(config)
    head = torch.nn.Linear(*target.head_weight.shape[::-1], bias=False)
    with torch.no_grad():
        head.weight.copy_(25 * target.head_weight)
    target.model.set_output_embeddings(head.requires_grad_(False))
    return target


def test_trained_on_one_text_it_drafts_the_tuned_targets(tmp_path, tiny_config):
    plain = answers(Engine.load(sharp_target(tiny_config), "none"), 25, prompts=PROMPTS[3:4])[0]
    target = sharp_target(tiny_config)
    ids = Engine.load(target, "none").encode(PROMPTS[3])
    record = ResponseRecord("one", "chat", ids, plain, "length", 0.0, 0)
    cfg = medusa2(target, draft_vocab_size=512, max_steps=50, learning_rate=1e-3, heads_lr_multiplier=10.0,
                  heads_warmup=0.75, row_length=96, lora_targets=["q_proj", "down_proj"])  # fmt: skip
    drafter, _ = run_training(target, [record], cfg, tmp_path)
    assert all(bool(factor.any()) for factor in drafter.lora.values())
    engine = Engine.load(target, drafter, num_draft_tokens=3, depth=2, top_k=1)
    answer = engine.generate(PROMPTS[3:4], SamplingParams(25, ignore_eos=True))[0]
    assert answer.token_ids == answers(Engine.load(drafter.tuned(target), "none"), 25, prompts=PROMPTS[3:4])[0]
    assert answer.stats.accepted >= 0.9 * 2 * answer.stats.rounds


def test_training_computes_what_decoding_computes(drafter, tiny_config):
    """The graph's own features of a packed row, and every head over them, beside the runtime's on the merged target."""
    fresh = Target.load(tiny_config)
    ids = torch.randint(3, 300, (11,), generator=torch.Generator().manual_seed(1)).tolist()
    batch = pack([(4, 7)], 11, ids)
    layout = make_layout(batch, 3)
    graph = drafter.training_graph(medusa2(fresh, num_heads=3).drafter, fresh).eval()
    seen = {}
    graph.drafter.forced, kept = lambda layout, taps: seen.update(taps=taps) or kept(layout, taps), drafter.forced
    try:
        graph(layout, BatchInputs(fresh.device)(batch, layout))
    finally:
        del drafter.forced
    runner = TargetRunner(drafter.tuned(fresh), 1, 64, (8,))
    _, taps = runner.prefill(0, ids)
    torch.testing.assert_close(seen["taps"], taps[0, : len(layout.active)], rtol=0, atol=1e-4)
    labels = Labels(len(ids))
    labels.probabilities = torch.full((len(ids), 300), 1 / 300)
    rows = list(drafter.forced(layout, Features(seen["taps"], labels.features(layout).teacher).taps))
    proposer = HeadsProposer(drafter, (8,), 1, 3)
    proposer.reserve(1, 64)
    for t in range(2, len(ids) - 2):
        proposer.start(0, ids[: t + 1], ids[t + 1], taps[0, : t + 1])
        state = proposer._states([0])
        for head in range(min(3, len(ids) - 2 - t)):
            row = (layout.active[layout.steps[head].reach] == t).nonzero().item()
            wanted = drafter.output_head(head)(rows[head][1][row])
            atol = 1e-5 * float(wanted.detach().abs().max())
            torch.testing.assert_close(drafter.logits(head, state)[0], wanted, rtol=0, atol=atol)
        proposer.release(0)


# ---- the export


def test_the_export_holds_heads_and_adapter_and_nothing_of_the_target(fresh, folder, drafter):
    files = set(verify_folder(folder, "export").files)
    assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors", "medusa_lm_head.safetensors"} <= files
    assert not [name for name in files if not name.endswith((".json", ".safetensors", ".md"))]
    assert set(load_file(folder / "medusa_lm_head.safetensors")) == {
        f"{head}.0.linear.{kind}" for head in range(3) for kind in ("weight", "bias")
    }
    assert len(load_file(folder / "adapter/adapter_model.safetensors")) == 8 * 7 * 2
    contract = json.loads((folder / "contract.json").read_text())
    assert contract["adapter_sha256"] == drafter.adapter(fresh).sha256
    assert json.loads((folder / "drift.json").read_text()) == DRIFT
    card = (folder / "README.md").read_text()
    for words in (
        "**This export changes the target's text.**", "outputs equal the tuned target's plain decoding, token for",
        "| KL(original \\|\\| tuned), nats per token | 0.2500 |", "| 75.0% |", "40 of 2 records",
        contract["adapter_sha256"], "# Medusa-2 drafter for tiny-random",
    ):  # fmt: skip
        assert words in card
    assert "never a token" not in card and str(folder.parent) not in card


def test_peft_reads_the_adapter_to_the_same_logits(fresh, folder, drafter):
    ids = torch.tensor([RECORDS[0].prompt_ids + RECORDS[0].response_ids])
    theirs = PeftModel.from_pretrained(fresh.own_model(), str(folder / "adapter")).eval()
    runner = TargetRunner(tuned_target(fresh, folder), 1, 64, ())
    hidden, _ = runner.prefill(0, ids[0].tolist())
    with torch.no_grad():
        wanted = theirs(input_ids=ids, use_cache=False).logits[0]
    atol = 1e-5 * float(wanted.detach().abs().max())
    torch.testing.assert_close(runner.logits(hidden[0]), wanted, rtol=0, atol=3 * atol)


def test_what_was_exported_is_what_is_loaded(fresh, folder, drafter):
    loaded, contract = load_drafter(folder, tuned_target(fresh, folder))
    assert contract.family == "medusa2" and loaded.shape == drafter.shape
    for name, value in drafter.own_state().items():
        found = loaded.own_state()[name]
        assert found.equal(value if name in ("d2t", "t2d") or "lora" in name else value.bfloat16().float()), name


def test_the_heads_on_an_untuned_target_are_refused(fresh, folder):
    with pytest.raises(ContractError, match=r"adapter_sha256 is '\w{64}', but what is loaded now has 'none'. A"):
        load_drafter(folder, fresh)


def test_a_changed_or_missing_adapter_is_refused(fresh, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(copy / "adapter")
    with pytest.raises(ArtifactError, match="adapter_config.json: listed in manifest.json but missing"):
        Engine.load(fresh, copy)
    copy = shutil.copytree(folder, tmp_path / "edited")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    export_setup.edit_tensors(copy, export_setup.put(name, lambda x: x + 0.5), "adapter/adapter_model.safetensors")
    with pytest.raises(ContractError, match=r"contract.json: adapter_sha256 is '\w{64}', but what is loaded now has"):
        Engine.load(fresh, copy)


def test_the_probe_sees_heads_of_other_features(fresh, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    change = export_setup.put("0.0.linear.weight", lambda x: x.flip(0).contiguous())
    export_setup.edit_tensors(copy, change, "medusa_lm_head.safetensors")
    with pytest.raises(ContractError, match="probe text 0: drafter logits differ"):
        Engine.load(fresh, copy)


# ---- with others


def test_joined_drafters_have_to_fit_the_tuned_target(folder, tmp_path, caplog, tiny_config):
    caplog.set_level(logging.INFO)
    fresh = Target.load(tiny_config)
    engine = Engine.load(fresh, f"{folder}+ngram", num_draft_tokens=6, depth=3, top_k=2)
    assert "tuned by adapter" in caplog.text and str(folder) in caplog.text
    assert answers(engine, 4) == answers(Engine.load(engine.target, "none"), 4)
    untuned = export_setup.export(fresh, tmp_path / "eagle3")
    with pytest.raises(ContractError, match=r"eagle3/contract.json: adapter_sha256 is 'none', but what is loaded now"):
        Engine.load(fresh, f"{folder}+{untuned}")
    second = write(fresh, wild(fresh, medusa2(fresh, num_heads=3), 0.03), tmp_path / "second")
    with pytest.raises(ConfigError, match=f"{folder} tunes the target by adapter .*, {second} by .*: there is one"):
        Engine.load(fresh, f"{folder}+{second}")
    twin = shutil.copytree(folder, tmp_path / "twin")
    assert Engine.load(fresh, f"{folder}+{twin}").target.title == engine.target.title
    with pytest.raises(TargetError, match="one adapter at a time"):
        Engine.load(engine.target, second)


def test_the_newest_export_may_be_one_that_tunes(fresh, folder):
    assert choose_drafter(None, fresh, (folder.parent,)) == str(folder)


# ---- measuring


def test_all_contestants_decode_the_tuned_target(fresh, folder, drafter):
    settings = EvalConfig(max_new_tokens=6, compare_transformers=False)
    runtime = RuntimeConfig(num_draft_tokens=4, depth=2, top_k=2)
    report = measure(fresh, folder, oracle.PROMPTS[:1], runtime, settings, SamplingConfig())
    assert report["target"] == f"tiny-random tuned by adapter {drafter.adapter(fresh).sha256[:12]}"
    assert report["identical"] == 1
    texts = [row["text"] for row in report["per_prompt"]]
    tuned, prompts = drafter.tuned(fresh), [list(prompt.messages) for prompt in oracle.PROMPTS[:1]]
    params = SamplingParams(6)
    plain, base = (Engine.load(target, "none").generate(prompts, params) for target in (tuned, fresh))
    assert texts == [answer.text for answer in plain] != [answer.text for answer in base]


def test_a_comparison_holds_it_against_its_own_target(fresh, folder, drafter, tiny_folder, tmp_path):
    run = comparison(tiny_folder, tmp_path / "out", "ngram", str(folder), count=1)
    console = Console(record=True, width=250)
    first, second = entries = compare(run, console)
    title = f"tiny tuned by adapter {drafter.adapter(fresh).sha256[:12]}"
    assert (first["target"], second["target"]) == ("tiny", title)
    assert (first["identical"], second["identical"]) == (1, 1)
    assert first["per_prompt"][0]["text"] != second["per_prompt"][0]["text"]
    assert f"; {second['target']}: plain decoding {second['plain_tokens_per_s']:.1f} tokens/s" in conditions(entries)
    assert by_target({"a": str(folder), "b": "ngram", "c": str(folder), "d": "none"}) == [
        {"a": str(folder), "c": str(folder)},
        {"b": "ngram", "d": "none"},
    ]


def test_transformers_beside_it_is_tuned_too(fresh, drafter):
    from runtime.peer import TransformersPeer

    tuned = drafter.tuned(fresh)
    ids = [RECORDS[0].prompt_ids]
    params = SamplingParams(12, ignore_eos=True)
    plain = Engine.load(tuned, "none").generate(ids, params)
    assert TransformersPeer(tuned).generate(ids, [params])[0][:12] == plain[0].token_ids


def test_acceptance_during_training_is_on_the_tuned_target(fresh, drafter, monkeypatch, tiny_config):
    target, seen = Target.load(tiny_config), []
    monkeypatch.setattr(Engine, "generate", lambda self, ids, params: seen.append(self.target) or [])
    quick_acceptance((drafter, (8,)), target, oracle.PROMPTS[:1], RuntimeConfig(num_draft_tokens=4), 4)
    assert seen[0].adapter.sha256 == drafter.adapter(target).sha256 and target.adapter is None
    assert laid_out(drafter, target)  # the given target is still what training needs


def test_a_card_written_again_keeps_the_adapter_and_the_drift(fresh, folder, drafter, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    before = {path.relative_to(copy): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    contract = load_drafter(folder, drafter.tuned(fresh))[1]
    pipeline.add_report(copy, fresh, contract, DataSummary("x", 3, 30, True), None)
    after = {path.relative_to(copy): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    changed = {str(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed == {"README.md", "manifest.json"}
    assert "| 0.2500 |" in (copy / "README.md").read_text()


def test_a_run_starts_from_an_export_with_its_adapter(fresh, folder, drafter, tiny_config):
    cfg = medusa2(fresh, num_heads=3)
    cfg.init_from = str(folder)
    started = make_drafter(cfg, Target.load(tiny_config), RECORDS)
    for name, factor in started.lora.items():
        assert factor.equal(drafter.lora[name]) and factor.requires_grad
    assert started.heads[0][0].linear.weight.equal(drafter.heads[0][0].linear.weight.bfloat16().float())


def test_medusas_heads_are_its_first_stage(tiny_config, tmp_path):
    fresh = Target.load(tiny_config)  # as training needs it: an engine lays it out anew
    run = run_settings(fresh, drafter=MedusaConfig(draft_vocab_size=300, num_heads=3))
    heads = make_drafter(run, fresh, RECORDS)
    with torch.no_grad():
        heads.heads[1][0].linear.weight.normal_()
    contract = describe_drafter(heads, fresh, taps=(8,), steps=3, max_length=64)
    export_drafter(heads, fresh, contract, tmp_path / "first", command="train")
    cfg = medusa2(fresh, num_heads=3)
    cfg.init_from = str(tmp_path / "first")
    started = make_drafter(cfg, fresh, RECORDS)
    kept = heads.heads[1][0].linear.weight.bfloat16().float()
    assert started.heads[1][0].linear.weight.equal(kept) and started.t2d.equal(heads.t2d)
    assert all(value.requires_grad for value in started.lora.values())
    assert all(value.count_nonzero() == 0 for name, value in started.lora.items() if name.endswith("lora_B"))
    cfg = medusa2(fresh, num_heads=2)
    cfg.init_from = str(tmp_path / "first")
    with pytest.raises(ContractError, match="init_from.*graph.num_heads is 3.*has 2"):
        make_drafter(cfg, fresh, RECORDS)
    run.init_from = str(tmp_path / "second")
    tuned = started.tuned(fresh)
    contract = describe_drafter(started, tuned, taps=(8,), steps=3, max_length=64)
    export_drafter(started, tuned, contract, tmp_path / "second", command="train", beside={"drift.json": DRIFT})
    with pytest.raises(ContractError, match="init_from.*family is 'medusa2'.*has 'medusa'"):
        make_drafter(run, fresh, RECORDS)


def test_generate_with_it_says_the_tuned_models_text_and_leaves_the_model(fresh, folder, drafter):
    model, ids = fresh.own_model(), torch.tensor([RECORDS[0].prompt_ids])
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    before = model.generate(ids, **options)
    found = model.generate(ids, **options, custom_generate=outrider_generate(str(folder), fresh.tokenizer))
    plain = Engine.load(drafter.tuned(fresh), "none").generate(ids.tolist(), SamplingParams(5))[0].token_ids
    assert found[0, ids.shape[1] :].tolist() == plain != before[0, ids.shape[1] :].tolist()
    assert model.generate(ids, **options).equal(before)


def test_answers_of_the_untuned_target_are_not_the_tuned_ones(fresh, drafter, tmp_path):
    tuned = drafter.tuned(fresh)
    answered = ResponseSet(tmp_path, [], {"settings": dict(fresh.fingerprint)})
    answered.require_target(fresh)
    with pytest.raises(ContractError, match=r"adapter_sha256 is None .*, the loaded target"):
        answered.require_target(tuned)
