"""The logits of the real target's drafter in the projects whose layouts it is written in: within 1e-4 over a chain of
three."""

from __future__ import annotations

import pytest

from drafters.config import TargetConfig
from drafters.export.forms import write_form
from drafters.target import Target
from tests.drafters.forms_setup import source_of
from tests.oracles.oracle_setup import assert_same, chains, needs, states, text_ids
from tests.oracles.test_eagle3 import economize_logits, specforge_logits, speculators_logits
from tests.test_real_target import KEPT, target  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.oracle, pytest.mark.slow]


@pytest.fixture(scope="module")
def source(target):  # noqa: F811
    return source_of(KEPT, target)


@pytest.fixture(scope="module")
def mine(source):
    ids, taps = text_ids(source.target), source.contract.tap_indices
    return chains(source.drafter, states(source.target, taps, ids), ids)


@needs("speculators", "hs_connectors")
def test_speculators_computes_the_same(source, mine, tmp_path):
    ids = text_ids(source.target)
    folder = write_form("speculators", source, tmp_path / "speculators")
    assert_same(mine, speculators_logits(folder, states(source.target, source.contract.tap_indices, ids), ids))


@needs("specforge")
def test_specforge_computes_the_same(source, mine, tmp_path):
    ids = text_ids(source.target)
    folder = write_form("eagle3", source, tmp_path / "eagle3")
    taps = states(source.target, source.contract.tap_indices, ids)
    assert_same(mine, specforge_logits(folder, source.target, taps, ids))


@needs("economize")
@pytest.mark.parametrize("dialect", ["eagle3", "speculators"])
def test_economize_computes_the_same(target, tmp_path, dialect):  # noqa: F811
    config = TargetConfig(name="own", path=str(target.folder), dtype="float32", device="cpu")
    own = Target.load(config)  # economize attaches to it
    source = source_of(KEPT, own)
    ids, taps = text_ids(own), source.contract.tap_indices
    folder = write_form(dialect, source, tmp_path / dialect)
    assert_same(chains(source.drafter, states(own, taps, ids), ids), economize_logits(folder, own, taps, ids))
