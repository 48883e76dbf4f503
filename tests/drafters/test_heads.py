"""Medusa and Hydra: graphs, losses, what learns, what is measured, exports in their own projects' names."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from drafters.config import RuntimeConfig, TargetFacts
from drafters.config_check import check
from drafters.config_drafter import HydraConfig, MedusaConfig
from drafters.errors import ArtifactError, ConfigError, ContractError
from drafters.export import describe_drafter, export_drafter, load_drafter
from drafters.held_out import held_out_batches
from drafters.losses import Teacher
from drafters.models import FAMILIES
from drafters.models.heads import RANKS, HeadsTraining
from drafters.models.layers import causal_attention
from drafters.models.layout import Features, make_layout
from drafters.plan import drafter_parameters
from drafters.plan_families import FORMULAS
from drafters.schedule import hold_out
from tests.drafters.export_setup import edit_json, edit_tensors, put
from tests.drafters.test_ttt import pack
from tests.drafters.training_setup import make_records, new_drafter, run_settings, run_training
from tests.helpers import complaint, settings

VOCAB, DECAY = 300, 0.7
KINDS = {
    "medusa-2": MedusaConfig(draft_vocab_size=VOCAB, num_heads=3),
    "medusa-1": MedusaConfig(draft_vocab_size=VOCAB, num_heads=3, num_layers=2, own_heads=True),
    "hydra": HydraConfig(draft_vocab_size=VOCAB, num_heads=3, num_layers=2),
    "hydra++": HydraConfig(draft_vocab_size=VOCAB, num_heads=3, num_layers=1, own_heads=True, prefix=True),
}
DOCUMENTS = [(4, 6), (3, 7), (1, 3), (2, 1)]  # prompt and response lengths; the last two are too short for all heads
EVERY_KIND = pytest.mark.parametrize("kind", list(KINDS))
RECORDS = make_records(4)


def wild(target, kind):
    """A drafter with random weights, none of them at rest."""
    drafter = new_drafter(target, RECORDS, run_settings(target, drafter=KINDS[kind]))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name not in drafter.borrowed:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return drafter


def some(target, documents=DOCUMENTS, steps=3):
    """A packed batch of random ids with its layout and features; some of the target's choices are no draft ids."""
    generator = torch.Generator().manual_seed(5)
    length = sum(map(sum, documents))
    batch = pack(documents, length + 2, torch.randint(0, 500, (length,), generator=generator).tolist())
    layout = make_layout(batch, steps)
    rows = len(layout.teacher)
    choice = torch.randint(-30, VOCAB, (rows,), generator=generator).clamp_min(-1)
    teacher = Teacher(torch.softmax(2 * torch.randn(rows, VOCAB, generator=generator), -1), choice)
    taps = torch.randn(len(layout.active), target.hidden_size, generator=generator)
    return batch, layout, Features(taps, teacher)


# ---- graphs


def _block(weights, name, x):
    skip = x
    if f"{name}.res_connection.weight" in weights:
        skip = x @ weights[f"{name}.res_connection.weight"].T + weights[f"{name}.res_connection.bias"]
    return skip + functional.silu(x @ weights[f"{name}.linear.weight"].T + weights[f"{name}.linear.bias"])


def _written_out(drafter, feature, tokens, index):
    """Logits of one head from the feature of token t and the tokens t+1 .. t+1+index, by the papers' formulas."""
    weights, shape = dict(drafter.named_parameters()), drafter.shape
    if drafter.family == "medusa":
        x, names = feature, [f"heads.{index}.{layer}" for layer in range(shape.num_layers)]
        head = f"heads.{index}.{shape.num_layers}.weight" if shape.own_heads else "lm_head.weight"
    else:
        x = torch.cat([feature, *drafter.embedding[tokens[: index + 1]]])
        names = [f"blocks.{index}.{layer}" for layer in range(shape.num_layers)]
        head = f"lm_heads.{index if shape.own_heads else 0}.weight"
    for name in names:
        x = _block(weights, name, x)
    return x @ weights[head].T


def _prefix(drafter, taps, position):
    """What Hydra++ reads at a position of one text: a Llama layer over the features up to it, and a norm."""
    where = torch.arange(position + 1)[None]
    out = drafter.prefix_layer(taps[None, : position + 1], where, causal_attention)
    return drafter.prefix_norm(out[0, -1])


def _dense(drafter, batch, layout, features):
    """Every head at every position of every document by itself; returns the loss and statistics [4, steps]."""
    steps, total = len(layout.steps), torch.zeros(())
    stats = torch.zeros(4, steps)
    active = {int(flat): number for number, flat in enumerate(layout.active)}
    labels = {int(flat): number for number, flat in enumerate(layout.teacher)}
    ids = batch.ids[0]
    for document in range(int(batch.document_ids.max()) + 1):
        where = (batch.document_ids[0] == document).nonzero().flatten().tolist()
        answers = batch.loss_mask[0][where]
        own = features.taps[[active[flat] for flat in where[:-1]]]
        for t in range(len(where) - 2):
            alive, feature = True, own[t]
            if drafter.context is not None:
                feature = _prefix(drafter, own, t)
            for j in range(steps):
                if t + 2 + j >= len(where) or not answers[t + 2 : t + 3 + j].all():
                    break
                logits = _written_out(drafter, feature, ids[[*where[t + 1 :]]], j)
                row = labels[where[t + 1 + j]]
                choice = int(features.teacher.choice[row])
                right = choice >= 0 and int(logits.argmax()) == choice
                alive = alive and right
                stats[1:, j] += torch.tensor([float(right), float(alive), 1.0])
                if choice >= 0:
                    loss = -(features.teacher.probabilities[row] * torch.log_softmax(logits, -1)).sum()
                    stats[0, j] += loss.item()
                    total = total + DECAY**j * loss
    return total, stats


@EVERY_KIND
def test_training_equals_a_dense_reference_forward_and_gradient(tiny_target, kind):
    drafter = wild(tiny_target, kind)
    batch, layout, features = some(tiny_target)
    loss, stats = HeadsTraining(drafter, DECAY, KINDS[kind].loss)(layout, features)
    wanted, wanted_stats = _dense(drafter, batch, layout, features)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(stats, wanted_stats, rtol=1e-5, atol=1e-5)
    own = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    assert set(own) == {name for name, _ in drafter.named_parameters()} - set(drafter.borrowed)
    mine, theirs = (torch.autograd.grad(x, list(own.values())) for x in (loss, wanted))
    for name, one, other in zip(own, mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert float(one.abs().max()) > 1e-3, name


@EVERY_KIND
def test_first_logits_are_head_0_at_every_position(tiny_target, kind):
    drafter = wild(tiny_target, kind)
    generator = torch.Generator().manual_seed(2)
    ids, taps = torch.randint(0, 500, (1, 6), generator=generator), torch.randn(1, 5, 64, generator=generator)
    found = drafter.first_logits(ids, taps, torch.arange(5)[None])[0]
    for t in range(5):
        feature = taps[0, t] if drafter.context is None else _prefix(drafter, taps[0], t)
        torch.testing.assert_close(found[t], _written_out(drafter, feature, ids[0, t + 1 :], 0), rtol=0, atol=1e-4)


@EVERY_KIND
def test_a_new_head_says_what_the_target_said_one_token_before(tiny_target, kind):
    drafter = new_drafter(tiny_target, RECORDS, run_settings(tiny_target, drafter=KINDS[kind]))
    batch = pack([(5, 20)], 25, make_records(1, 5, 20)[0].prompt_ids[:5] + make_records(1, 5, 20)[0].response_ids[:20])
    drafter.warm_start(tiny_target, batch, (8,))
    mask = torch.ones(25, 25, dtype=torch.bool).tril()[None, None]
    taps, _ = tiny_target.hidden(batch.ids, batch.position_ids, mask, (8,))
    said = functional.linear(taps[0, :-1], tiny_target.head_weight[drafter.t2d])
    with torch.no_grad():
        found = drafter.first_logits(batch.ids, taps[:, :-1], batch.position_ids[:, :-1])[0]
    if drafter.context is None:
        torch.testing.assert_close(found, said, rtol=0, atol=1e-4)
    else:  # its layer is random, but small beside the feature it passes on at its own scale
        assert float(functional.cosine_similarity(found, said).min()) > 0.9
        assert float((found.norm(dim=-1) / said.norm(dim=-1) - 1).abs().max()) < 0.2


# ---- training


@EVERY_KIND
def test_only_its_own_weights_learn(tiny_target, tmp_path, kind):
    cfg = run_settings(tiny_target, drafter=KINDS[kind], max_steps=2)
    before = new_drafter(tiny_target, RECORDS, cfg).state_dict()
    embedding, head = tiny_target.embed_weight.clone(), tiny_target.head_weight.clone()
    drafter, _ = run_training(tiny_target, RECORDS, cfg, tmp_path)
    for name, tensor in drafter.state_dict().items():
        fixed = name in (*drafter.borrowed, "d2t", "t2d")
        assert torch.equal(tensor, before[name]) == fixed, name
    if drafter.borrowed:
        borrowed = drafter.state_dict()[drafter.borrowed[0]]
        assert torch.equal(borrowed, tiny_target.head_weight[drafter.t2d])
    assert torch.equal(embedding, tiny_target.embed_weight) and torch.equal(head, tiny_target.head_weight)


# ---- what is measured


@EVERY_KIND
def test_accuracies_are_shares_of_positions_by_head_and_rank(tiny_target, kind):
    drafter = wild(tiny_target, kind)
    batches = [some(tiny_target), some(tiny_target, DOCUMENTS[:2])]
    drafter.measure((layout, features) for _, layout, features in batches)
    hits, counts = torch.zeros(3, RANKS), torch.zeros(3)
    for _, layout, features in batches:
        for index, (_, read) in enumerate(drafter.forced(layout, features.taps)):
            logits = drafter.output_head(index)(read)
            for row, flat in enumerate(layout.active[layout.steps[index].reach].tolist()):
                label = layout.teacher.tolist().index(flat + 1 + index)
                choice, order = int(features.teacher.choice[label]), logits[row].argsort(descending=True).tolist()
                counts[index] += 1
                if choice in order[:RANKS]:
                    hits[index, order.index(choice)] += 1
    assert drafter.measured["positions"] == counts.tolist() and float(hits.sum()) > 0
    torch.testing.assert_close(torch.tensor(drafter.accuracies), hits / counts[:, None], rtol=0, atol=1e-6)
    # A head that met no position leaves nothing, also of what was measured before.
    drafter.measure([some(tiny_target, [(2, 2)])[1:]])
    assert drafter.measured == {} and drafter.accuracies is None


def test_they_are_measured_on_records_held_out_of_training(tiny_target):
    cfg = run_settings(tiny_target, drafter=KINDS["medusa-2"])
    records = make_records(60)
    drafter = new_drafter(tiny_target, records, cfg)
    found = list(held_out_batches(drafter, tiny_target, records, cfg))
    held = hold_out(records)[1]
    tokens = sorted(id for layout, _ in found for id in layout.tokens.tolist())
    assert tokens == sorted(id for r in held for id in [*r.prompt_ids, *r.response_ids][1:])
    assert all(len(layout.steps) == 3 and features.taps.shape[1] == 64 for layout, features in found)
    drafter.measure(found)
    assert drafter.measured["positions"] == [sum(len(r.response_ids) - i for r in held) for i in range(3)]
    drafter.measure(held_out_batches(drafter, tiny_target, records[:19], cfg))
    assert drafter.measured == {}


# ---- exports

NAMES = {
    "medusa-2": {f"{i}.0.linear.{part}" for i in range(3) for part in ("weight", "bias")},
    "medusa-1": {f"{i}.{j}.linear.{part}" for i in range(3) for j in range(2) for part in ("weight", "bias")}
    | {f"{i}.2.weight" for i in range(3)},
    "hydra": {f"hydra_mlp.{i}.{j}.linear.{part}" for i in range(3) for j in (1, 3) for part in ("weight", "bias")}
    | {f"hydra_mlp.{i}.1.res_connection.{part}" for i in range(3) for part in ("weight", "bias")},
    "hydra++": {f"hydra_mlp.{i}.1.linear.{part}" for i in range(3) for part in ("weight", "bias")}
    | {f"hydra_mlp.{i}.1.res_connection.{part}" for i in range(3) for part in ("weight", "bias")}
    | {f"hydra_lm_head.{i}.1.weight" for i in range(3)}
    | {f"prefix_embeding_layer.layers.0.self_attn.{x}_proj.weight" for x in "qkvo"}
    | {f"prefix_embeding_layer.layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
    | {f"prefix_embeding_layer.layers.0.{x}_layernorm.weight" for x in ("input", "post_attention")}
    | {"prefix_embeding_layer.norm.weight"},
}
FILES = {"medusa": "medusa_lm_head.safetensors", "hydra": "hydra_lm_head.safetensors"}


def _export(target, drafter, dest):
    contract = describe_drafter(drafter, target, taps=(8,), steps=3, max_length=64)
    return export_drafter(drafter, target, contract, dest, command="python train.py"), contract


@EVERY_KIND
def test_an_export_has_the_projects_names_and_loads_bit_for_bit(tiny_target, tmp_path, kind):
    drafter = wild(tiny_target, kind)
    drafter.measure([some(tiny_target)[1:]])
    folder, contract = _export(tiny_target, drafter, tmp_path / "export")
    tensors = load_file(folder / FILES[drafter.family])
    assert set(tensors) == NAMES[kind]
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert set(load_file(folder / "draft_vocab.safetensors")) == {"d2t", "t2d"}
    loaded, found = load_drafter(folder, tiny_target)
    assert found == contract and loaded.shape == drafter.shape and loaded.measured == drafter.measured
    assert "ttt_steps" not in contract.graph and loaded.deepest(contract.graph) == 3
    for name, tensor in drafter.state_dict().items():
        wanted = tensor if name in (*drafter.borrowed, "d2t", "t2d") else tensor.bfloat16().float()
        assert torch.equal(loaded.state_dict()[name], wanted), name


def test_configs_are_what_their_readers_look_at(tiny_target, tmp_path):
    found = {}
    for kind in KINDS:
        folder, _ = _export(tiny_target, wild(tiny_target, kind), tmp_path / kind)
        found[kind] = json.loads((folder / "config.json").read_text())
        assert not (folder / "measured.json").exists()
    base = {"base_model_name_or_path": "tiny-random"}
    assert found["medusa-2"] == base | {"medusa_num_heads": 3, "medusa_num_layers": 1, "version": "2"}
    assert found["medusa-1"] == base | {"medusa_num_heads": 3, "medusa_num_layers": 2}
    hydra = base | {"hydra_num_heads": 3, "grounded_heads": True, "hidden_state_offset": 0, "dropout_rate": 0.0}
    assert found["hydra"] == hydra | {"hydra_num_layers": 2, "hydra_head_arch": "mlp"}
    assert found["hydra++"] == hydra | {"hydra_num_layers": 1, "hydra_head_arch": "prefix-mlp"}
    card = (tmp_path / "medusa-1" / "README.md").read_text()
    assert "# Medusa drafter for tiny-random" in card and "TGI reads" in card


# The probe replays the first draft, so it sees head 0 and what that reads.
SEEN = [
    ("medusa-2", "0.0.linear.bias"),
    ("medusa-1", "0.1.linear.weight"),
    ("medusa-1", "0.2.weight"),
    ("hydra", "hydra_mlp.0.1.res_connection.weight"),
    ("hydra", "hydra_mlp.0.3.linear.weight"),
    ("hydra++", "prefix_embeding_layer.norm.weight"),
    ("hydra++", "prefix_embeding_layer.layers.0.self_attn.k_proj.weight"),
]


def test_the_probe_refuses_changed_weights_and_other_damage_is_named(tiny_target, tmp_path):
    folders = {kind: _export(tiny_target, wild(tiny_target, kind), tmp_path / kind)[0] for kind in KINDS}
    for kind, name in SEEN:
        file = FILES[kind.partition("-")[0].rstrip("+")]
        kept = {path: path.read_bytes() for path in folders[kind].iterdir()}
        edit_tensors(folders[kind], put(name, lambda tensor: tensor.flip(0)), file)
        with pytest.raises(ContractError, match="probe text 0: drafter logits differ by "):
            load_drafter(folders[kind], tiny_target)
        for path, data in kept.items():
            path.write_bytes(data)
    edit_tensors(folders["medusa-2"], lambda tensors: tensors.pop("1.0.linear.bias"), FILES["medusa"])
    with pytest.raises(ArtifactError, match=r"medusa_lm_head.safetensors: tensor heads.1.0.linear.bias is missing"):
        load_drafter(folders["medusa-2"], tiny_target)
    edit_json(folders["medusa-1"], "config.json", architectures=["MedusaModel"])
    with pytest.raises(ContractError, match="config.json: architectures is .*contract.json says 'absent'"):
        load_drafter(folders["medusa-1"], tiny_target)
    graph = json.loads((folders["hydra"] / "contract.json").read_text())["graph"]
    edit_json(folders["hydra"], "contract.json", graph=graph | {"prefix": True})
    with pytest.raises(ContractError, match=r"rope is \{\}, this code runs rope_type default"):
        load_drafter(folders["hydra"], tiny_target)


@pytest.mark.parametrize(
    "measured",
    [
        {"accuracies": [[0.5]] * 3},
        {"positions": [1, 1, 1], "accuracies": [[0.5]] * 2},
        {"positions": [1, 1, 1], "accuracies": [[0.5], [0.5], [1.5]]},
        {"positions": [1, 1, 1], "accuracies": [[0.5], [0.5], []]},
        {"positions": [1, 1, 1], "accuracies": 0.5},
    ],
)
def test_a_measurement_that_cannot_be_its_own_is_refused(tiny_target, tmp_path, measured):
    drafter = wild(tiny_target, "medusa-2")
    drafter.measured = measured
    folder, _ = _export(tiny_target, drafter, tmp_path / "export")
    with pytest.raises(ArtifactError, match=r"measured.json: expected positions and, for each of 3 heads, accuracies"):
        load_drafter(folder, tiny_target)


def test_a_measurement_is_sealed_and_other_families_keep_none(tiny_target, tmp_path):
    from tests.drafters.export_setup import build_drafter, describe

    drafter = wild(tiny_target, "medusa-2")
    drafter.measure([some(tiny_target)[1:]])
    folder, _ = _export(tiny_target, drafter, tmp_path / "export")
    data = bytearray((folder / "measured.json").read_bytes())
    data[-6] ^= 1
    (folder / "measured.json").write_bytes(data)
    with pytest.raises(ArtifactError, match="measured.json: sha256"):
        load_drafter(folder, tiny_target)
    eagle = build_drafter(tiny_target)
    eagle.measured = {"positions": [1]}
    other = export_drafter(eagle, tiny_target, describe(eagle, tiny_target), tmp_path / "eagle3", command="x")
    with pytest.raises(ArtifactError, match="measured.json: family eagle3 keeps nothing beside its weights"):
        load_drafter(other, tiny_target)


# ---- settings and plan


def test_settings_are_checked():
    run = settings("train", "drafter=hydra", "drafter.prefix=true", "drafter.warm_start=false")
    assert run.drafter == HydraConfig(draft_vocab_size=12288, num_layers=2, prefix=True, warm_start=False)
    assert (run.drafter.steps, run.drafter.decay, run.drafter.marks) == (4, 0.8, [])
    assert "drafter=medusa has no key 'prefix'. It belongs to drafter=hydra" in complaint(
        "train", "drafter=medusa", "drafter.prefix=true"
    )

    def refused(message, **changes):
        with pytest.raises(ConfigError, match=message):
            check(replace(run, **changes))

    for family in (MedusaConfig, HydraConfig):
        check(replace(run, drafter=family(warm_start=False, own_heads=True)))
        refused(r"warm_start=false has nothing to do.*Set drafter.own_heads=true", drafter=family(warm_start=False))
        refused(r"drafter.num_heads=0: must be a whole number >= 1", drafter=family(num_heads=0))
        refused(r"drafter.num_layers=0: must be a whole number >= 1", drafter=family(num_layers=0))
        refused(r"drafter.head_decay=1.5: must be a number > 0 and <= 1", drafter=family(head_decay=1.5))
    refused(
        "runtime.tree=static needs a number of nodes, but runtime.num_draft_tokens=auto",
        runtime=RuntimeConfig(tree="static"),
    )
    refused("runtime.tree=lopsided: must be one of dynamic, static", runtime=RuntimeConfig(tree="lopsided"))
    check(replace(run, runtime=RuntimeConfig(tree="static", num_draft_tokens=16)))


@EVERY_KIND
def test_planned_parameters_match_the_real_module(kind):
    facts, cfg = TargetFacts(576, 1536, 30, 9, 3, 64, 49152, True), KINDS[kind]
    family = FAMILIES[cfg.family]
    sizes = {"target_hidden_size": facts.hidden_size, "vocab_size": facts.vocab_size}
    for name in ("draft_vocab_size", "num_heads", "num_layers", "own_heads"):
        sizes[name] = getattr(cfg, name)
    if cfg.family == "hydra":
        sizes["prefix"] = cfg.prefix
    if cfg.family == "hydra" and cfg.prefix:
        sizes |= {
            "intermediate_size": facts.intermediate_size, "num_attention_heads": facts.num_heads,
            "num_kv_heads": facts.num_kv_heads, "head_dim": facts.head_dim, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64, "rope_theta": 1e4,
        }  # fmt: skip
    with torch.device("meta"):
        drafter = family(family.shape_type(**sizes))
    counted = {name: parameter.numel() for name, parameter in drafter.named_parameters()}
    trained = sum(count for name, count in counted.items() if name not in drafter.borrowed)
    assert drafter_parameters(cfg, facts) == (sum(counted.values()), trained)


def test_the_output_head_that_heads_share_is_counted_once_for_each():
    facts = TargetFacts(576, 1536, 30, 9, 3, 64, 49152, True)
    for kind, shared in (("medusa-2", 576 * VOCAB), ("medusa-1", 0), ("hydra", 576 * VOCAB), ("hydra++", 0)):
        everything = drafter_parameters(KINDS[kind], facts)[0]
        passes = FORMULAS[KINDS[kind].family].passes(KINDS[kind], facts)
        assert passes * everything == pytest.approx(everything + 2 * shared)


@EVERY_KIND
@pytest.mark.parametrize("documents", [[], [(5, 0)]])
def test_a_row_without_answers_has_zero_loss_and_zero_gradient(tiny_target, kind, documents):
    drafter = wild(tiny_target, kind)
    _, layout, features = some(tiny_target, documents)
    loss, stats = HeadsTraining(drafter, DECAY, KINDS[kind].loss)(layout, features)
    assert loss.item() == 0.0 and stats.abs().sum() == 0
    own = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss, own, allow_unused=True)
    assert all(gradient is None or gradient.abs().sum() == 0 for gradient in found)
