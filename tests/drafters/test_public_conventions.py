"""Which reading of a public drafter is taken: the one that measures best, and none is taken in silence."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafters.models.eagle3 import Eagle3Drafter
from drafters.public.conventions import Measured, measure, samples
from drafters.public.load import load_public, resolve_public
from tests.drafters.public_setup import eagle3, fitted, write
from tests.drafters.test_public_eagle3 import speculators

AUX = "eagle_aux_hidden_state_layer_ids"
# What config.json says, and which hidden states the drafter was made for: the default here is 2, 4, 5.
CONVENTIONS = {
    "indices": ({AUX: [1, 3, 7]}, (1, 3, 7)),
    "layers counted from 0, at the top": ({AUX: [1, 3, 6]}, (2, 4, 7)),
    "nested, as SGLang counts": ({"eagle_config": {AUX: [1, 3, 6]}}, (2, 4, 7)),
    "nested, as vLLM takes them": ({"eagle_config": {AUX: [1, 3, 6]}}, (1, 3, 6)),
    "the last listed too": ({AUX: [1, 3, 6, 8]}, (1, 3, 6)),
    "none": ({}, (2, 4, 5)),
    "none, one block earlier": ({}, (1, 3, 4)),
    "none, quarters": ({}, (2, 4, 6)),
}


@pytest.fixture(scope="module")
def fit(tiny_target):
    """Fitted tensors by the hidden states they were made for, and a config.json without ids."""
    config, tensors = eagle3(draft_ids=None, intermediate_size=512)
    found: dict[tuple[int, ...], dict[str, Tensor]] = {}

    def make(taps: tuple[int, ...]) -> tuple[dict, dict[str, Tensor]]:
        if taps not in found:
            found[taps] = fitted(tensors, config, tiny_target, taps, tensors["lm_head.weight"])
        return dict(config), found[taps]

    return make


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_the_hidden_states_are_found_whatever_convention_the_ids_follow(tiny_target, tmp_path, fit, caplog, convention):
    said, taps = CONVENTIONS[convention]
    config, tensors = fit(taps)
    caplog.set_level(logging.INFO)
    found = resolve_public(write(tmp_path / "a", config | said, tensors), tiny_target)
    assert found.reading.taps == taps == found.contract.tap_indices
    best = found.measured[found.reading.title]
    assert best.rate > 0.9 and not best.by_chance
    others = [found.measured[each.title].rate for each in found.public.readings if each is not found.reading]
    assert others and min(others) < 0.6
    first = found.public.readings[0]
    assert ("fits better and is taken" in caplog.text) == (found.reading is not first)
    assert f"{best.rate:.3f} ({best.accepted} of {best.positions}; at temperature 1 " in caplog.text
    assert f"with {found.reading.title}, taps {list(taps)} <- taken" in caplog.text
    assert all(each.title in caplog.text for each in found.public.readings)
    assert "DOES NOT FIT" not in caplog.text


def test_the_contract_says_what_was_taken(tiny_target, tmp_path, fit):
    config, tensors = fit((2, 4, 5))
    drafter, contract = load_public(write(tmp_path / "a", config, tensors), tiny_target)
    assert isinstance(drafter, Eagle3Drafter) and not drafter.training
    assert contract.taps[0] == "output of block 1 before norm" and contract.max_length == 512
    contract.check_target(tiny_target)
    assert drafter.shape_from(contract.graph, contract.rope, "here") == drafter.shape


def test_an_absent_norm_before_residual_is_settled_by_measuring(tiny_target, tmp_path):
    for flag in (False, True):
        config, tensors = eagle3(draft_ids=None, intermediate_size=512, norm_before_residual=flag)
        tensors = fitted(tensors, config, tiny_target, (2, 4, 5), tensors["lm_head.weight"], size=10.0)
        del config["norm_before_residual"]
        folder = write(tmp_path / str(flag), *speculators(config, tensors, draft_vocab_size=None))
        assert resolve_public(folder, tiny_target).reading.shape.norm_before_residual is flag


# ---- reported with a number, and with what would be better


def reported(folder: Path, target, caplog) -> str:
    caplog.set_level(logging.INFO)
    found = resolve_public(folder, target)
    assert found.reading.taps == (2, 4, 5)
    return caplog.text


def better(text: str) -> str:
    """What the one warning says of a reading that would fit, whose acceptance is high."""
    (said,) = [line for line in text.splitlines() if "is damaged or says it wrong: acceptance would be" in line]
    assert float(said.partition("would be ")[2].split()[0]) > 0.9
    return said


def test_a_drafter_that_is_at_chance_however_it_is_read_is_reported_with_its_number(tiny_target, tmp_path, caplog):
    folder = write(tmp_path / "a", *eagle3())
    found = resolve_public(folder, tiny_target)
    assert all(measured.by_chance for measured in found.measured.values())
    best = found.measured[found.reading.title]
    assert f"DOES NOT FIT: {best.rate:.3f} of its first drafts are accepted" in caplog.text
    assert f"({best.accepted} of {best.positions}), which is chance" in caplog.text


def test_a_random_head_is_reported_and_the_targets_own_named(tiny_target, tmp_path, caplog):
    config, tensors = eagle3(draft_ids=None, intermediate_size=512)
    tensors = fitted(tensors, config, tiny_target, (2, 4, 5), tiny_target.head_weight)
    text = reported(write(tmp_path / "a", config, tensors), tiny_target, caplog)
    assert "DOES NOT FIT" in text
    assert "the target's own in place of lm_head.weight" in better(text)


def test_an_embedding_of_zeros_is_reported_and_the_targets_own_named(tiny_target, tmp_path, caplog):
    config, tensors = eagle3(draft_ids=None, intermediate_size=512)
    tensors = fitted(tensors, config, tiny_target, (2, 4, 5), tensors["lm_head.weight"])
    tensors["embed_tokens.weight"] = torch.zeros(512, 64)
    text = reported(write(tmp_path / "a", config, tensors), tiny_target, caplog)
    assert "the target's own in place of embed_tokens.weight" in better(text)


def test_a_swapped_map_is_reported_and_the_right_order_named(tiny_target, tmp_path, caplog):
    config, tensors = eagle3(draft_ids=None, intermediate_size=512)
    tensors = fitted(tensors, config, tiny_target, (2, 4, 5), tensors["lm_head.weight"])
    swapped = torch.arange(512).roll(256)
    offsets = {"d2t": swapped - torch.arange(512)}
    right = "in ascending order in place of d2t's"
    text = reported(write(tmp_path / "a", config, tensors | offsets), tiny_target, caplog)
    assert "DOES NOT FIT" in text and f"the ids of d2t {right}" in better(text)
    caplog.clear()
    both = tensors | offsets | {"t2d": torch.ones(512, dtype=torch.bool)}
    text = reported(write(tmp_path / "b", config, both), tiny_target, caplog)
    assert "DOES NOT FIT" in text and f"the ids of t2d {right}" in better(text)


def test_a_flag_the_wrong_way_round_is_named(tiny_target, tmp_path, caplog):
    config, tensors = eagle3(draft_ids=None, intermediate_size=512, norm_before_residual=True)
    tensors = fitted(tensors, config, tiny_target, (2, 4, 5), tensors["lm_head.weight"], size=10.0)
    del config["norm_before_residual"]
    text = reported(write(tmp_path / "a", config, tensors), tiny_target, caplog)
    assert "norm_before_residual the other way round" in better(text)


# ---- the measure itself


def test_what_is_measured_is_the_share_of_first_drafts_that_are_the_targets_choice(tiny_target, random_eagle3):
    texts = samples(tiny_target, (2, 4, 5))
    found = measure(random_eagle3, (2, 4, 5), texts)
    hits, positions, overlap, said, wanted = 0, 0, 0.0, [], []
    for text in texts:
        length = text.ids.shape[1]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
        places = torch.arange(length)[None]
        taps, last = tiny_target.hidden(text.ids, places, mask, (2, 4, 5))
        with torch.no_grad():
            logits = random_eagle3.first_logits(text.ids, taps[:, :-1], places[:, :-1])[0]
        drafts, law = logits.argmax(-1), tiny_target.logits(last)[0].softmax(-1)
        chosen = law.argmax(-1)
        for drafted in range(text.start, length + 1):  # the token drafted, which the answer holds or would go on with
            said.append(int(random_eagle3.draft_to_target(drafts[drafted - 2])))
            wanted.append(int(chosen[drafted - 1]))
            hits += said[-1] == wanted[-1]
            q, p = logits[drafted - 2].softmax(-1), law[drafted - 1][random_eagle3.t2d]
            overlap += float(torch.minimum(p, q).sum())
            positions += 1
    assert (found.accepted, found.positions) == (hits, positions)
    assert float(found.overlap.sum()) == pytest.approx(overlap, abs=1e-3)
    # Of all ways to pair a draft with a choice, the share in which they are the same token.
    pairs = sum(draft == choice for draft in said for choice in wanted)
    assert found.chance == pytest.approx(pairs / positions**2) and 0 < found.chance < 0.5


@pytest.fixture
def random_eagle3(tiny_target):
    from tests.drafters.export_setup import build_drafter

    return build_drafter(tiny_target).eval()


def made(hits: str, chance: float = 0.01, overlap: str = "") -> Measured:
    marks = [torch.tensor([float(mark == "x") for mark in each or hits]) for each in (hits, overlap)]
    return Measured(marks[0].bool(), marks[1], chance)


def test_luck_does_not_decide():
    assert not made("xx........").beats(made("x........."))  # one more could be luck
    assert made("xxxxxxxxx.").beats(made("x........."))
    assert not made("xxxxx.....").beats(made(".....xxxxx"))
    assert not made("xxxxx.....").beats(made("xxxxx....."))
    # Alike in hits, the overlap decides; where it would lose hits, it does not.
    few, many, none = "xxxx......", "xxxxxxxxx.", "." * 10
    assert made(few, overlap=many).beats(made(few, overlap=none))
    assert not made(few, overlap=many).beats(made("x" * 10, overlap=none))
    assert not made(none, overlap=many).beats(made(none, overlap=none))  # nor where both are right by chance alone
    assert made("." * 100).by_chance and made("xx" + "." * 98).by_chance
    assert not made("x" * 20 + "." * 80).by_chance
    assert made("x" * 30 + "." * 70, chance=0.25).by_chance  # such as drafts of the same token everywhere
