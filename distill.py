"""Collect the target's own responses to a set of prompts, as exact token ids. See --help."""

from __future__ import annotations

import hydra
from rich.console import Console

from drafters import cli
from drafters.config import DistillRun


@hydra.main(version_base="1.3", config_path="conf", config_name="distill")
@cli.job
def main(run: DistillRun, console: Console) -> None:
    # Imported here: a wrong setting or --help must not wait for torch.
    from runtime.pipeline import run_distill

    run_distill(run, console)


if __name__ == "__main__":
    cli.launch(main, "distill")
