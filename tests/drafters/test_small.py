"""Small models: the target itself when nothing is left out, distilled on response positions, exported as plain folders.
"""

from __future__ import annotations

import json
import operator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafters.batches import collate
from drafters.config import TargetConfig
from drafters.config_check import check
from drafters.config_drafter import Objective, SmallConfig
from drafters.contract import hash_tokenizer
from drafters.errors import ArtifactError, ConfigError, ContractError
from drafters.export import describe_drafter, export_drafter, load_drafter
from drafters.facts import known_facts
from drafters.models import SmallDrafter, SmallShape
from drafters.models.layout import Features, make_layout
from drafters.models.small import SmallTraining
from drafters.plan import activation_bytes, drafter_parameters, make_plan
from drafters.target import Target
from drafters.warm_start import LOGIT_STD
from tests.drafters.export_setup import edit_json, edit_tensors, put
from tests.drafters.test_trainer import Killed, assert_same_weights, cfg_like
from tests.drafters.test_ttt import DOCUMENTS, LENGTH, Labels, pack, tokens_of
from tests.drafters.training_setup import make_records, new_drafter, run_settings, run_training
from tests.helpers import complaint, settings

WHOLE = 512  # the tiny target's vocabulary


def _settings(target, trainer=None, **options):
    drafter = SmallConfig(**{"draft_vocab_size": 300, "num_layers": 2} | options)
    return run_settings(target, drafter=drafter, **(trainer or {}))


def _own_sizes(**options):
    return {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "warm_start": False,
            "draft_vocab_size": WHOLE} | options  # fmt: skip


def _drafter(target, **options) -> SmallDrafter:
    return new_drafter(target, make_records(4), _settings(target, **options))


@pytest.fixture(scope="module")
def wild(tiny_target):
    """Random weights on the target's embedding and head."""
    drafter = _drafter(tiny_target)
    torch.manual_seed(3)
    for parameter in (p for p in drafter.parameters() if p.requires_grad and p.dim() > 1):
        nn.init.normal_(parameter, std=0.2)
    return drafter


# ---- the graph


def test_with_every_layer_it_is_the_target(tiny_target):
    drafter = _drafter(tiny_target, num_layers=8, draft_vocab_size=WHOLE)
    drafter.start_from(tiny_target, range(8))
    ids = torch.randint(3, 500, (2, 9), generator=torch.Generator().manual_seed(2))
    wanted = tiny_target.model(ids).logits
    found = drafter.first_logits(ids, torch.empty(2, 8, 0), torch.arange(8).expand(2, 8))
    torch.testing.assert_close(found, wanted[:, 1:], rtol=1e-5, atol=1e-5)
    assert drafter.language_model()(ids).logits.allclose(wanted, atol=1e-5)


def test_it_shares_embedding_and_head_with_a_target_of_its_width(tiny_target):
    drafter = _drafter(tiny_target)
    assert drafter.embedding.data_ptr() == tiny_target.embed_weight.data_ptr()
    assert drafter.language_model().get_input_embeddings().weight.data_ptr() == tiny_target.embed_weight.data_ptr()
    assert drafter.lm_head.weight.equal(tiny_target.head_weight[drafter.t2d])
    assert drafter.usual_taps(8) == () and drafter.deepest({}) is None
    assert not any("embed" in name or "lm_head" in name for name in drafter.own_state())


def test_of_another_width_its_embedding_is_its_own_and_its_head(tiny_target):
    drafter = _drafter(tiny_target, **_own_sizes())
    assert drafter.lm_head.weight is drafter.embed_tokens.weight and drafter.embedding is None
    copied = drafter.clone()
    assert copied.lm_head.weight is copied.embed_tokens.weight is not drafter.embed_tokens.weight
    assert "embed_tokens.weight" in drafter.own_state() and "lm_head.weight" not in drafter.own_state()
    with pytest.raises(ConfigError, match="hidden_size=32 is not the target's 64.*Set drafter.draft_vocab_size=512"):
        _drafter(tiny_target, **_own_sizes(draft_vocab_size=300))


# ---- what it starts as


@pytest.mark.parametrize("layers", [None, [2, 5]])
def test_it_starts_as_the_layers_asked_for(tiny_target, layers):
    cfg = _settings(tiny_target, layers=layers)
    drafter = new_drafter(tiny_target, make_records(2), cfg)
    drafter.initialise(cfg.drafter, tiny_target, collate(make_records(2), [(0,)], 64), ())
    for own, index in zip(drafter.layers, layers or [0, 1], strict=True):
        for name, weight in tiny_target.backbone.layers[index].named_parameters():
            assert own.get_parameter(name).equal(weight), (index, name)
    ratio = drafter.norm.weight / tiny_target.backbone.norm.weight
    torch.testing.assert_close(ratio, ratio[:1].expand(64))
    ids = torch.tensor([make_records(2)[0].prompt_ids + make_records(2)[0].response_ids])
    spread = drafter.language_model()(ids).logits.std(-1).mean()
    assert spread.item() == pytest.approx(LOGIT_STD, rel=0.05)
    before = new_drafter(tiny_target, make_records(2), cfg)
    kept = before.layers[0].mlp.up_proj.weight.clone()
    before.initialise(replace(cfg.drafter, warm_start=False, layers=None), tiny_target, None, ())
    assert before.layers[0].mlp.up_proj.weight.equal(kept)


def test_layers_that_do_not_fit_are_refused(tiny_target):
    with pytest.raises(ConfigError, match=r"drafter.layers=\[2, 8\]: target 'tiny-random' has layers 0 to 7"):
        _drafter(tiny_target).start_from(tiny_target, [2, 8])
    with pytest.raises(ConfigError, match="o_proj.weight is .64, 32. in the drafter.*drafter.warm_start=false"):
        _drafter(tiny_target, num_heads=2, num_kv_heads=2).start_from(tiny_target, [0, 1])


# ---- the loss


def test_supervised_are_all_response_tokens_and_the_chains_behind_them(tiny_target):
    layout = SmallDrafter.layout(pack([(3, 4), (2, 2)], 12, tokens_of([(3, 4), (2, 2)])), 3)
    # Row: p p p r r r r | p p r r; position t predicts token t+1.
    assert [layout.active[step.reach].tolist() for step in layout.steps] == [[2, 3, 4, 5, 8, 9], [2, 3, 4, 8], [2, 3]]
    assert layout.steps[0].teacher.tolist() == list(range(6)) and layout.steps[1].teacher.tolist() == [1, 2, 3, 5]
    assert layout.counts() == [6, 4, 2] and layout.teacher.tolist() == [2, 3, 4, 5, 8, 9]


def _features(layout, labels) -> Features:
    features = labels.features(layout)
    return Features(features.taps[:, :0], features.teacher)


def _small() -> SmallDrafter:
    shape = SmallShape(32, 32, 48, 2, 4, 2, 8, 1e-5, 1e4, 64, 50, 20)
    torch.manual_seed(0)
    drafter = SmallDrafter(shape).double()
    for parameter in drafter.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, std=0.3)
    drafter.bind_embedding(torch.randn(50, 32, dtype=torch.float64))
    return drafter


def _dense(drafter: SmallDrafter, batch, labels, steps: int):
    """Each document through the model as transformers runs it, one prediction at a time."""
    model, total, stats = drafter.language_model().requires_grad_(True), 0.0, torch.zeros(4, steps)
    model.model.layers, model.model.norm, model.lm_head = drafter.layers, drafter.norm, drafter.lm_head
    for document in range(int(batch.document_ids.max()) + 1):
        where = (batch.document_ids[0] == document).nonzero().flatten()
        answers, logits = batch.loss_mask[0][where], model(batch.ids[:, where]).logits[0]
        hits = []
        for t in range(len(where) - 1):
            choice = int(labels.choice[where[t]])
            hits.append(choice >= 0 and int(logits[t].argmax()) == choice)
            if answers[t + 1] and choice >= 0:
                loss = -(labels.probabilities[where[t]] * torch.log_softmax(logits[t], -1)).sum()
                total, stats[0, 0] = total + loss, stats[0, 0] + loss.item()
        for t in range(len(where) - 1):
            for j in range(steps):
                if t + 1 + j < len(where) and answers[t + 1 : t + 2 + j].all():
                    stats[1:, j] += torch.tensor([float(hits[t + j]), float(all(hits[t : t + j + 1])), 1.0])
    return total, stats


def test_loss_and_statistics_equal_a_dense_reference():
    drafter, batch, labels = _small(), pack(DOCUMENTS, LENGTH, tokens_of(DOCUMENTS)), Labels(LENGTH)
    layout = SmallDrafter.layout(batch, 3)
    # Choices the model makes, here and there: else no chain would hold.
    positions = layout.position_ids[None]
    mask = torch.ones(1, 1, len(layout.active), len(layout.active), dtype=torch.bool).tril()
    mask &= ((positions == 0).cumsum(-1)[:, None] == (positions == 0).cumsum(-1)[..., None])[:, None]
    own = drafter.lm_head(drafter.states(layout.tokens[None], positions, mask)[0]).argmax(-1)
    labels.choice[layout.active] = torch.where(torch.arange(len(own)) % 4 > 0, own, labels.choice[layout.active])
    loss, stats = SmallTraining(drafter, Objective())(layout, _features(layout, labels))
    wanted, wanted_stats = _dense(drafter, batch, labels, 3)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(stats, wanted_stats, rtol=1e-5, atol=1e-5)
    assert 0 < stats[2, 2] < stats[2, 1] < stats[2, 0] < stats[3, 0]
    trained = [p for name, p in drafter.named_parameters()]
    for mine, theirs in zip(torch.autograd.grad(loss, trained), torch.autograd.grad(wanted, trained), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_the_objective_is_the_one_asked_for():
    drafter, batch, labels = _small(), pack(DOCUMENTS, LENGTH, tokens_of(DOCUMENTS)), Labels(LENGTH)
    layout = SmallDrafter.layout(batch, 1)
    asked = SmallConfig(objective="tvd")
    loss = drafter.training_graph(asked, None)(layout, _features(layout, labels))[0]
    count = int((labels.choice[layout.teacher] >= 0).sum())
    assert 0 < loss < count  # a distance between two laws is at most 1


def test_filler_only_row_has_zero_loss_and_finite_zero_gradient():
    drafter, batch = _small(), pack([], 8, [])
    layout = SmallDrafter.layout(batch, 3)
    loss, stats = SmallTraining(drafter, Objective())(layout, _features(layout, Labels(8)))
    assert loss.item() == 0.0 and stats.abs().sum() == 0
    assert all(g.abs().sum() == 0 for g in torch.autograd.grad(loss, list(drafter.parameters())))


def test_steps_of_the_draft_families_are_laid_out_as_before():
    batch = pack([(3, 4), (2, 2)], 12, tokens_of([(3, 4), (2, 2)]))
    layout = make_layout(batch, 2)
    assert layout.active[layout.steps[0].reach].tolist() == [1, 2, 3, 4, 7, 8]


# ---- training


@pytest.mark.parametrize("sizes", [{}, _own_sizes()])
def test_only_its_own_weights_learn(tiny_target, tmp_path, sizes):
    records, cfg = make_records(6), _settings(tiny_target, **sizes)
    before = new_drafter(tiny_target, records, cfg)
    before.initialise(cfg.drafter, tiny_target, collate(records, [(0,)], 64), ())
    kept = {name: weight.clone() for name, weight in before.named_parameters()}
    embedding, head = tiny_target.embed_weight.clone(), tiny_target.head_weight.clone()
    drafter, _ = run_training(tiny_target, records, cfg, tmp_path)
    for name, weight in drafter.named_parameters():
        assert weight.equal(kept[name]) is (name == "lm_head.weight"), name
    assert tiny_target.embed_weight.equal(embedding) and tiny_target.head_weight.equal(head)


def test_kept_features_and_a_resumed_run_repeat_bit_for_bit(tiny_target, tmp_path):
    def kill(_):
        raise Killed

    records = make_records(6)
    cfg = _settings(tiny_target, {"max_steps": 4, "save_every": 2, "features": "cached"})
    whole, _ = run_training(tiny_target, records, cfg, tmp_path / "whole")
    with pytest.raises(Killed):
        run_training(tiny_target, records, cfg_like(cfg, 3), tmp_path / "halves", kill)
    resumed, result = run_training(tiny_target, records, cfg, tmp_path / "halves")
    assert result.step == 4 and list((tmp_path / "halves" / "features").glob("*/*.safetensors"))
    assert_same_weights(whole, resumed)


# ---- the export


def _export(drafter: SmallDrafter, target: Target, dest: Path) -> Path:
    contract = describe_drafter(drafter, target, taps=(), steps=5, max_length=64)
    return export_drafter(drafter, target, contract, dest, command="python train.py drafter=small")


@pytest.fixture
def folder(tiny_target, wild, tmp_path):
    return _export(wild, tiny_target, tmp_path / "export")


def test_an_export_is_a_plain_folder_that_computes_the_same(tiny_target, wild, folder):
    drafter, contract = load_drafter(folder, tiny_target)
    assert drafter.shape == wild.shape and contract.taps == () and "ttt_steps" not in contract.graph
    for name, tensor in wild.own_state().items():
        loaded = drafter.state_dict()[name]
        assert loaded.equal(tensor.to(torch.bfloat16).to(loaded.dtype) if tensor.is_floating_point() else tensor), name
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ids = torch.randint(3, 500, (1, 12), generator=torch.Generator().manual_seed(4))
    mine = drafter.language_model()(ids).logits
    assert model(ids).logits[..., drafter.t2d].equal(mine)
    assert model(ids).logits.shape[-1] == WHOLE and model.get_input_embeddings().weight.equal(tiny_target.embed_weight)
    assert hash_tokenizer(AutoTokenizer.from_pretrained(folder)) == hash_tokenizer(tiny_target.tokenizer)
    assert model.generation_config.eos_token_id == list(tiny_target.eos_ids)


def test_transformers_takes_it_as_assistant_model(tiny_target, folder):
    target = AutoModelForCausalLM.from_pretrained(tiny_target.folder, dtype=torch.float32).eval()
    small = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    wanted = target.generate(ids, max_new_tokens=12, do_sample=False)
    assert target.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=small).equal(wanted)


def test_files_hold_what_they_say(tiny_target, wild, folder):
    tensors = load_file(folder / "model.safetensors")
    own = {f"model.{name}" for name in wild.own_state() if name not in ("d2t", "t2d")}
    assert set(tensors) == own | {"model.embed_tokens.weight", "lm_head.weight"}
    assert {tensors[name].dtype for name in own} == {torch.bfloat16}
    assert tensors["lm_head.weight"].equal(tiny_target.head_weight)  # no 16 bits hold these numbers
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["num_hidden_layers"]) == (["LlamaForCausalLM"], 2)
    assert (config["tie_word_embeddings"], config["vocab_size"]) == (False, WHOLE)
    card = (folder / "README.md").read_text()
    assert "# Small-model drafter for" in card and "`assistant_model`" in card


def test_a_tied_bf16_embedding_is_written_once_in_bf16(tiny_target, tmp_path):
    from transformers import LlamaForCausalLM

    source = AutoModelForCausalLM.from_pretrained(tiny_target.folder, dtype=torch.bfloat16)
    tied = LlamaForCausalLM(type(source.config)(**source.config.to_dict() | {"tie_word_embeddings": True}))
    state = {name: t for name, t in source.state_dict().items() if name != "lm_head.weight"}
    tied.load_state_dict(state, strict=False)
    tied.to(torch.bfloat16).save_pretrained(tmp_path / "target")
    tiny_target.tokenizer.save_pretrained(tmp_path / "target")
    path = str(tmp_path / "target")
    target = Target.load(TargetConfig(name="tied", path=path, dtype="float32", device="cpu"))
    folder = _export(_drafter(target), target, tmp_path / "export")
    tensors = load_file(folder / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16 and "lm_head.weight" not in tensors
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.get_output_embeddings().weight.equal(target.embed_weight)
    load_drafter(folder, target)


def test_a_model_of_its_own_width_is_exported_with_its_own_embedding(tiny_target, tmp_path):
    drafter = _drafter(tiny_target, **_own_sizes())
    folder = _export(drafter, tiny_target, tmp_path / "export")
    loaded, _ = load_drafter(folder, tiny_target)
    assert loaded.lm_head.weight is loaded.embed_tokens.weight
    assert loaded.embed_tokens.weight.equal(drafter.embed_tokens.weight.bfloat16().float())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert model(ids).logits.equal(loaded.language_model()(ids).logits)


@pytest.mark.parametrize("name", ["layers.0.self_attn.q_proj", "layers.0.mlp.down_proj", "layers.1.self_attn.v_proj"])
def test_the_probe_sees_a_changed_weight(tiny_target, folder, name):
    edit_tensors(folder, put(f"model.{name}.weight", lambda tensor: tensor.flip(0)))
    with pytest.raises(ContractError, match="probe text 0: drafter logits differ by "):
        load_drafter(folder, tiny_target)


def test_another_embedding_head_tensor_or_config_is_refused(tiny_target, folder):
    whole = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        without = operator.methodcaller("pop", name)
        for edit in (put(name, lambda tensor: tensor.flip(0)), put(name, torch.Tensor.bfloat16), without):
            edit_tensors(folder, edit)
            with pytest.raises(ArtifactError, match=f"tensor {name} is missing or not the target's own"):
                load_drafter(folder, tiny_target)
            edit_tensors(folder, lambda tensors: tensors.update(whole))
    edit_tensors(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ArtifactError, match="tensor norm.weight is missing"):
        load_drafter(folder, tiny_target)
    edit_tensors(folder, lambda tensors: tensors.update(whole))
    edit_json(folder, "config.json", num_hidden_layers=3)
    with pytest.raises(ContractError, match="num_hidden_layers is 3.*says 2"):
        load_drafter(folder, tiny_target)


# ---- settings and plan


def test_settings_are_checked(tiny_target):
    def refused(message: str, **options: object) -> None:
        with pytest.raises(ConfigError, match=message):
            check(_settings(tiny_target, **options))

    refused("drafter.num_layers=0", num_layers=0)
    refused(r"drafter.layers=\[5, 2\]: must be drafter.num_layers=2 rising indices", layers=[5, 2])
    refused(r"drafter.layers=\[1, 2, 5\].*Set drafter.num_layers=3", layers=[1, 2, 5])
    refused(r"drafter.layers=\[1, 8\]: target 'tiny-random' has layers 0 to 7", layers=[1, 8])
    refused("drafter.warm_start=false to start as none", layers=[1, 5], warm_start=False)
    refused("must be a multiple|no multiple of drafter.num_kv_heads=3", num_heads=4, num_kv_heads=3)
    assert "ttt_steps" in complaint("train", "drafter=small", "drafter.ttt_steps=2")
    run = settings("train", "drafter=small", "drafter.objective=reverse_kl")
    assert (run.drafter.loss.name, run.drafter.draft_vocab_size) == ("reverse_kl", 12288)


@pytest.mark.parametrize("sizes", [{}, _own_sizes(num_layers=3)])
def test_parameters_match_the_real_module(sizes, tiny_config):
    cfg, facts = SmallConfig(**{"draft_vocab_size": 100} | sizes), known_facts(tiny_config)
    pick = {name: getattr(cfg, name) or getattr(facts, name) for name in
            ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")}  # fmt: skip
    with torch.device("meta"):
        drafter = SmallDrafter(
            SmallShape(**pick, target_hidden_size=64, num_layers=3, rms_norm_eps=1e-5, rope_theta=1e4,
                       max_position_embeddings=64, vocab_size=512, draft_vocab_size=cfg.draft_vocab_size)
        )  # fmt: skip
    if sizes:
        drafter.bind(None)  # ties its head to its embedding
    counted, trained = drafter_parameters(cfg, facts)
    assert counted == sum(weight.numel() for weight in drafter.parameters())
    assert trained == counted - (0 if sizes else drafter.lm_head.weight.numel())


def test_a_plan_counts_one_pass_and_no_taps(tiny_target):
    run = _settings(tiny_target, {"row_length": 100})
    plan = make_plan(run)
    assert plan["feature_bytes_per_token"] == 64 * 2
    count = plan["drafter_parameters"]
    assert plan["work"]["drafter_flops"] / plan["work"]["target_forward_flops"] == pytest.approx(
        3 * count / plan["target_parameters"]
    )
    per_layer = 12 * 64 + 3 * 128 + (2 * 4 + 2 * 2) * 16
    target = 100 * (64 + 8 * 64 + 3 * 128) * 4
    assert activation_bytes(run, known_facts(run.target)) == 100 * (2 * per_layer * 4 + 2 * 300 * 4) + target
    assert "draft steps: 1," in " ".join(plan["assumptions"])
