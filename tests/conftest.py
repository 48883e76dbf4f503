"""Small random parts shared by the tests; nothing here needs the network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

USERS_CACHE = os.environ.get("OUTRIDER_CACHE")  # where a real target is kept between runs
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_config():
    from drafters.config import RandomSource, TargetConfig

    source = RandomSource(
        seed=0, hidden_size=64, intermediate_size=128, num_layers=8, num_heads=4, num_kv_heads=2, vocab_size=512
    )
    return TargetConfig(name="tiny-random", dtype="float32", device="cpu", random=source)


@pytest.fixture(scope="session")
def tiny_target(tiny_config, tmp_path_factory):
    """The seeded random target in fp32, built once in a private cache."""
    from drafters.target import Target

    before = os.environ.get("OUTRIDER_CACHE")
    os.environ["OUTRIDER_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    try:
        yield Target.load(tiny_config)
    finally:
        if before is None:
            del os.environ["OUTRIDER_CACHE"]
        else:
            os.environ["OUTRIDER_CACHE"] = before


@pytest.fixture(scope="session")
def tiny_folder(tiny_target) -> Path:
    return tiny_target.folder
