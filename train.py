"""Train one drafter, end to end, write an export for other engines, or explain a low tau. See --help."""

from __future__ import annotations

import hydra
from rich.console import Console

from drafters import cli
from drafters.config import TrainRun


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
@cli.job
def main(run: TrainRun, console: Console) -> None:
    # Imported here: a wrong setting or --help must not wait for torch.
    if run.plan:
        from drafters.plan import run_plan

        run_plan(run, console)
    elif run.export.source is not None:
        from drafters.exporting import run_export

        run_export(run, console)
    elif run.doctor is not None:
        from runtime.diagnosis import run_doctor

        run_doctor(run, console)
    else:
        from runtime.pipeline import run_train

        report = run_train(run, console)
        if run.export.dialect and report is not None:
            from drafters.exporting import run_export

            run_export(run, console)


if __name__ == "__main__":
    cli.launch(main, "train")
