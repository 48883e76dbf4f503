"""From drafter.path to a proposer."""

import copy

import pytest

from drafters.errors import ConfigError
from runtime.calibration import Calibration
from runtime.engine import EngineConfig
from runtime.loading import load_proposer
from runtime.proposers.merge import MergeProposer
from runtime.proposers.ngram import NgramProposer
from runtime.proposers.none import NoneProposer
from runtime.proposers.random import RandomProposer
from runtime.proposers.recycle import RecycleProposer
from runtime.proposers.small import SmallProposer
from runtime.proposers.suffix import SuffixProposer

CONFIG = EngineConfig(top_k=3)


@pytest.mark.parametrize(
    "path, kind",
    [
        (None, NoneProposer),
        ("none", NoneProposer),
        ("ngram", NgramProposer),
        ("suffix", SuffixProposer),
        ("recycle", RecycleProposer),
        ("random", RandomProposer),
    ],
)
def test_a_name_is_its_proposer(tiny_target, path, kind):
    proposer = load_proposer(path, tiny_target, CONFIG)
    assert type(proposer) is kind
    assert proposer.name == (path or "none")  # also what its nodes' sources say, and reports


def test_a_small_model_by_its_folder(tiny_target, tiny_folder):
    proposer = load_proposer(f"small:{tiny_folder}", tiny_target, CONFIG)
    assert type(proposer) is SmallProposer
    assert (proposer.top_k, proposer.vocab_size) == (3, tiny_target.vocab_size)
    assert proposer.model.dtype == tiny_target.dtype and proposer.model.device == tiny_target.device


def test_joined_drafters_share_the_calibration(tiny_target):
    calibration = Calibration()
    proposer = load_proposer("suffix+recycle", tiny_target, CONFIG, calibration)
    assert type(proposer) is MergeProposer and proposer.calibration is calibration
    assert [type(member) for member in proposer.members] == [SuffixProposer, RecycleProposer]
    assert proposer.name == "suffix+recycle" and proposer.wants_logits


def test_a_drafter_is_copied_and_a_proposer_is_not(tiny_target, random_drafter):
    drafter = copy.deepcopy(random_drafter)
    proposer = load_proposer(drafter, tiny_target, CONFIG)
    assert proposer.name == "eagle3" and proposer.drafter is not drafter
    assert load_proposer(proposer, tiny_target, CONFIG) is proposer


def test_a_path_that_is_none_of_them_lists_the_choices(tiny_target):
    with pytest.raises(ConfigError, match="'nowhere' is not a drafter.*Set drafter.path to an export folder, none"):
        load_proposer("nowhere", tiny_target, CONFIG)
