"""Checks of serve.py's own settings."""

from __future__ import annotations

from drafters.config import ServeRun
from drafters.drafter_path import parse_drafter_path
from drafters.errors import ConfigError


def check_serve(run: ServeRun) -> None:
    """Raise ConfigError for a setting of serve.py at odds with another, naming the key paths and the way out."""
    if run.drafter.path is not None:
        parse_drafter_path(run.drafter.path)
    _check_compare(run)
    _check_import(run)
    if run.sampling.min_tokens > run.eval.max_new_tokens:
        raise ConfigError(
            f"sampling.min_tokens={run.sampling.min_tokens} is more than "
            f"eval.max_new_tokens={run.eval.max_new_tokens}. Lower it, or raise eval.max_new_tokens."
        )
    if run.mode == "generate" and not run.prompt:
        raise ConfigError('mode=generate needs a prompt, but prompt is empty. Set prompt="...".')
    if run.mode != "generate" and run.prompt is not None:
        raise ConfigError(
            f"prompt={run.prompt!r} is read by mode=generate only, but mode={run.mode}. Set mode=generate."
        )


def _check_import(run: ServeRun) -> None:
    if run.mode != "import":
        return
    parts = parse_drafter_path(run.drafter.path or "none")
    if len(parts) != 1 or parts[0].kind not in ("export", "hub"):
        raise ConfigError(
            f"mode=import makes an export of one drafter, but drafter.path={run.drafter.path}. Set drafter.path to its "
            "folder or hub id."
        )


def _check_compare(run: ServeRun) -> None:
    if run.mode != "compare":
        if run.drafters:
            raise ConfigError(
                f"drafters={run.drafters} is read by mode=compare only, but mode={run.mode}. "
                "Set mode=compare, or drafter.path to run one."
            )
        return
    if not run.drafters:
        raise ConfigError(
            "mode=compare needs drafters, but drafters is empty. Set drafters=[A,B,...], each as drafter.path."
        )
    if run.drafter.path is not None:
        raise ConfigError(
            f"drafter.path={run.drafter.path} is not read by mode=compare. Put it among drafters={run.drafters}."
        )
    found = [[(part.kind, part.hub_id, part.folder and part.folder.resolve())
              for part in parse_drafter_path(path, "drafters")] for path in run.drafters]  # fmt: skip
    twice = next((path for index, path in enumerate(run.drafters) if found[index] in found[:index]), None)
    if twice is not None:
        raise ConfigError(f"drafters={run.drafters} names {twice} twice. Name each drafter once.")
    if run.sampling.temperature:
        raise ConfigError(
            f"sampling.temperature={run.sampling.temperature}: mode=compare measures at temperature 0, and tau at 1 "
            "too. Leave it out, or use mode=eval."
        )
    if run.verification != "coupled":
        raise ConfigError(
            f"verification={run.verification}: mode=compare compares texts with plain decoding's, which only "
            "verification=coupled keeps at every temperature. Leave it out, or use mode=eval."
        )
