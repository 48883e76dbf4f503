"""The logits of an EAGLE-3 export in the projects whose layouts it is written in: within 1e-4 over a chain of three."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafters.target import Target
from tests.drafters.export_setup import SHAPE, TAPS
from tests.oracles.oracle_setup import IDS, STEPS, assert_same, chains, needs, states, written

pytestmark = pytest.mark.oracle
WHOLE = {"draft_vocab_size": SHAPE.vocab_size}


@pytest.fixture(scope="module")
def target(tiny_target, tiny_config) -> Target:
    """No engine has laid it out, and the peers may attach to it what they like."""
    return Target.load(tiny_config)


def shifted(ids: Tensor, steps: int) -> Tensor:
    """ids [1, T] moved to the left, zeros behind."""
    return torch.cat((ids[:, steps:], ids.new_zeros(1, steps)), 1)


# ---- speculators


def speculators_logits(folder: Path, taps: Tensor, ids: Tensor = IDS) -> list[Tensor]:
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    said: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, out: said.append(out[0]))
    with torch.no_grad():
        model(taps[:, :-1], ids[:, 1:], torch.zeros_like(ids[:, 1:]), ttt_steps=STEPS)
    return said


@needs("speculators", "hs_connectors")
@pytest.mark.parametrize(
    "change",
    [
        {},
        WHOLE,
        {"fc_norm": True},
        {"norm_output": True},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_residual": True},
        {"norm_before_fc": True},
        {"attention_bias": True},
    ],
    ids=lambda change: "+".join(change) or "official",
)
def test_speculators_computes_the_same(target, tmp_path, change):
    source, folder = written(target, replace(SHAPE, **change), "speculators", tmp_path)
    taps = states(target)
    assert_same(chains(source.drafter, taps), speculators_logits(folder, taps))


# ---- specforge


def specforge_logits(folder: Path, target: Target, taps: Tensor, ids: Tensor = IDS) -> list[Tensor]:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig

    config = AutoDraftModelConfig.from_file(str(folder / "config.json"))
    model = AutoDraftModel.from_config(config, torch_dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert missing == ["embed_tokens.weight"] and not unexpected
    model.load_embedding(str(target.folder))
    length = ids.shape[1] - 1
    seen = torch.ones(1, length, dtype=torch.bool)
    with torch.no_grad():
        hidden = model.project_hidden_states(taps[:, :-1])
        mask = model.prepare_decoder_attention_mask(seen, hidden, 1, length, 0)
        cache: list[list[Tensor]] = [[], []]
        said = []
        for step in range(STEPS):
            hidden = model.backbone(
                input_embeds=model.embed_input_ids(shifted(ids[:, 1:], step)),
                hidden_states=hidden,
                cache_hidden=cache,
                attention_mask=mask,
                position_ids=torch.arange(length)[None],
            )
            said.append(model.compute_logits(hidden)[0])
    return said


@needs("specforge")
@pytest.mark.parametrize("change", [{}, {"fc_norm": True}], ids=["official", "fc_norm"])
def test_specforge_computes_the_same(target, tmp_path, change):
    source, folder = written(target, replace(SHAPE, **change), "eagle3", tmp_path)
    taps = states(target)
    assert_same(chains(source.drafter, taps), specforge_logits(folder, target, taps))


# ---- economize


def economize_logits(
    folder: Path, target: Target, taps: tuple[int, ...] = TAPS, ids: Tensor = IDS
) -> list[Tensor]:
    import economize

    technique = economize.load(target.model, folder).techniques["eagle3"]
    with torch.no_grad():
        embedded = target.model.get_input_embeddings()(ids)
        tapped = dict(zip(taps, states(target, taps, ids).chunk(len(taps), -1), strict=True))
        return [technique.head_logits(out)[0] for out in technique.rollout({0: embedded} | tapped, STEPS)]


@needs("economize")
@pytest.mark.parametrize("dialect", ["eagle3", "speculators"])
@pytest.mark.parametrize(
    "change", [{}, WHOLE, {"norm_before_residual": True}], ids=lambda change: "+".join(change) or "official"
)
def test_economize_computes_the_same(tiny_config, tmp_path, dialect, change):
    target = Target.load(tiny_config)
    source, folder = written(target, replace(SHAPE, **change), dialect, tmp_path)
    mine = chains(source.drafter, states(target))
    assert_same(mine, economize_logits(folder, target))


@needs("economize")
def test_economize_reads_the_taps_that_an_export_names(tiny_config, tmp_path):
    import economize

    target = Target.load(tiny_config)
    _, folder = written(target, replace(SHAPE, num_taps=2), "eagle3", tmp_path, (3, 7))
    assert json.loads((folder / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [3, 7]
    assert economize.load(target.model, folder).techniques["eagle3"].aux_layers == (3, 7)
