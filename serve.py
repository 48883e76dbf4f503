"""Measure a drafter against plain decoding, or generate and chat with it. See --help."""

from __future__ import annotations

import hydra
from rich.console import Console

from drafters import cli
from drafters.config import ServeRun


@hydra.main(version_base="1.3", config_path="conf", config_name="serve")
@cli.job
def main(run: ServeRun, console: Console) -> None:
    # Imported here: a wrong setting or --help must not wait for torch.
    from runtime.pipeline import run_serve

    run_serve(run, console)


if __name__ == "__main__":
    cli.launch(main, "serve")
