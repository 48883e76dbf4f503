"""The logits of a Medusa export in economize, which reads Medusa's own layout: within 1e-4 for every head."""

from __future__ import annotations

import pytest
import torch

from drafters.export.forms import write_form
from drafters.target import Target
from tests.drafters.forms_setup import KINDS, native, source_of
from tests.oracles.oracle_setup import IDS, assert_same, needs, states

pytestmark = pytest.mark.oracle


@needs("economize")
def test_economize_computes_the_same(tiny_config, tmp_path):
    import economize

    target = Target.load(tiny_config)
    source = source_of(native(target, tmp_path / "native", KINDS["medusa-own"]), target)
    folder = write_form("medusa-v1", source, tmp_path / "medusa-v1")
    drafter, heads = source.drafter, source.graph["num_heads"]
    raw: list[torch.Tensor] = []  # economize norms what it reads by itself
    hook = target.backbone.norm.register_forward_pre_hook(lambda module, given: raw.append(given[0]))
    with torch.no_grad():
        state = drafter.read(states(target, (target.num_layers,))[0])
        hook.remove()
        mine = [drafter.logits(index, state) for index in range(heads)]
        technique = economize.load(target.model, folder).techniques["medusa"]
        theirs = technique.head_logits(raw[0][0])
    assert theirs.shape == (IDS.shape[1], heads, target.vocab_size)
    assert_same(mine, list(theirs.unbind(1)))
