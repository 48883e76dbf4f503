"""Fixtures of the export tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def exported(tiny_target, tmp_path_factory) -> Path:
    """An export made for the tiny target; read only, tests that damage it take a copy."""
    from tests.drafters.export_setup import export

    return export(tiny_target, tmp_path_factory.mktemp("export") / "export")
