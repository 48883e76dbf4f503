"""What the three scripts share: settings checked before anything heavy is imported, errors told in one line."""

from __future__ import annotations

import difflib
import functools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    OmegaConfBaseException,
    ValidationError,
)  # fmt: skip
from rich.console import Console
from rich.tree import Tree

from drafters.artifacts import atomic_write_text
from drafters.config import GROUPS, RUNS, Section, TrainRun
from drafters.config_allowed import describe, keys, no_value, unknown_key
from drafters.config_check import to_dict, validate
from drafters.config_export import FIELD, SOURCE
from drafters.config_store import register
from drafters.errors import ConfigError, OutriderError

TRACE = "HYDRA_FULL_ERROR"
ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd")
GROUP_VALUE = "Config group override must be"


class _Stopped(BaseException):
    """Carries an OutriderError past Hydra, which would print every Exception of a job itself."""


def job(body: Callable[[Any, Console], None]) -> Callable[[DictConfig], None]:
    """Decorator under hydra.main: checks, shows and saves the settings, then calls body(run, console)."""

    @functools.wraps(body)
    def run_job(cfg: DictConfig) -> None:
        try:
            if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
                # Each job of a sweep owns a folder; the one in the config is the plain run's.
                cfg.output_dir = HydraConfig.get().runtime.output_dir
            run = validate(cfg)
            if os.environ.get("RANK", "0") == "0":
                announce(run, Console(stderr=True))
                # Jobs that train nothing may be given the folder of a run that did: its settings stay.
                if not (isinstance(run, TrainRun) and (run.doctor is not None or run.export.source is not None)):
                    save(run)
            body(run, Console())
        except OutriderError as error:
            raise _Stopped from error

    return run_job


def launch(main: Callable[[], None], script: str) -> None:
    """Run a hydra.main function of `script` and leave with 0 or the error's exit code (2: a setting is wrong).

    Such errors are one line on stderr; HYDRA_FULL_ERROR=1 shows the traceback instead.
    """
    register()
    _quieten()
    sys.argv[1:] = spelled(sys.argv[1:])
    before = os.environ.get(TRACE, "")
    # Hydra prints its own errors and leaves with 1 unless this is set; set, it hands them to us.
    os.environ[TRACE] = "1"
    try:
        error = _caught(main)
    finally:
        os.environ[TRACE] = before
    if error is None:
        return
    message = explain(error, script, sys.argv[1:])
    if message is None or before.lower() in ("1", "true", "yes"):
        raise error
    fail(message.replace(FIELD, SOURCE), error.exit_code if isinstance(error, OutriderError) else ConfigError.exit_code)


def spelled(arguments: list[str]) -> list[str]:
    """Arguments with `export.from` put as the field it sets: `from` cannot be the name of one."""
    return [re.sub(rf"^{re.escape(SOURCE)}(?==)", FIELD, text) for text in arguments]


def _quieten() -> None:
    """Libraries' bars and notices that tell a user nothing: bars in a log file, the search for an accelerator."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    if not any(Path(device).exists() for device in ACCELERATORS):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def _caught(main: Callable[[], None]) -> BaseException | None:
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader left (`| head`); without this Python complains once more while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except _Stopped as stopped:
        return stopped.__cause__
    except Exception as error:
        return error
    return None


def fail(message: str, status: int) -> None:
    """Say one error line on stderr and leave with `status`."""
    Console(stderr=True).print(f"error: {message}", soft_wrap=True, markup=False, highlight=False)
    sys.exit(status)


def announce(run: Section, console: Console) -> None:
    """Show the effective settings: a tree on a terminal, YAML elsewhere."""
    settings = to_dict(run)
    if console.is_terminal:
        console.print(_tree(settings, Tree("settings")))
    else:
        console.print(_yaml(settings), soft_wrap=True, markup=False, highlight=False)


def save(run: Section) -> None:
    """Keep the effective settings as output_dir/config.yaml."""
    folder = Path(run.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_text(folder / "config.yaml", _yaml(to_dict(run)))


def _yaml(settings: dict[str, Any]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(settings))


def _tree(settings: dict[str, Any], tree: Tree) -> Tree:
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            _tree(value, tree.add(key))
        else:
            tree.add(f"{key}: {value}")
    return tree


# ---- Hydra's errors in one line ---------------------------------------------------------------------------------


def explain(error: BaseException, script: str, arguments: list[str]) -> str | None:
    """One line for an error of composing the settings, or None when it is of another kind."""
    chain = _chain(error)
    ours = next((link for link in chain if isinstance(link, OutriderError)), None)
    if ours is not None:
        return str(ours)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _bad_option(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override}: not understood. Write KEY=VALUE; text with special characters: 'KEY=\"a, b\"'."
    if isinstance(error, ValueError) and str(error).startswith(GROUP_VALUE):
        wrong = [text for text in arguments if text.partition("=")[0].split("@")[0] in GROUPS[script]]
        return f"{wrong[-1] if wrong else error}: a group takes the name of one of its options. See {script}.py --help."
    detail = next((link for link in chain if isinstance(link, OmegaConfBaseException)), None)
    if detail is not None:
        dropped = next((name for name in GROUPS[script] if f"~{name}" in arguments), None)
        if dropped is not None:  # the start recipe is chosen by the names of the groups' options
            return no_value(dropped)
        return _bad_setting(detail, script, arguments)
    raw = re.search(r"full_key: (\S+)", str(error))
    if raw is not None:
        # OmegaConf stumbles over a mapping given to a section that is null and lets a plain AttributeError out.
        return f"{_written(raw.group(1), arguments)}: cannot take this value; the section is null here."
    if isinstance(error, CompactHydraException):
        return _bad_override(error, script, arguments)
    return None


def _chain(error: BaseException | None) -> list[BaseException]:
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links


def _bad_option(error: MissingConfigException) -> str:
    group, _, option = error.missing_cfg_file.partition("/")
    options = list(error.options or [])
    close = difflib.get_close_matches(option, options, n=1)
    hint = f"Did you mean {group}={close[0]}? " if close else ""
    if group == "target" and not close:
        hint = f"For your own model set target=custom target.path={option}. "
    return f"{group}={option}: group {group!r} has no such option. {hint}Allowed: {', '.join(options)}."


def _written(path: str, arguments: list[str]) -> str:
    found = [text for text in arguments if text.lstrip("+~").partition("=")[0] == path]
    return found[-1] if found else path


def _bad_setting(detail: OmegaConfBaseException, script: str, arguments: list[str]) -> str:
    path, schema = str(detail.full_key), detail.object_type
    closed = isinstance(schema, type) and issubclass(schema, Section)
    shown = _written(path, arguments)
    if closed and isinstance(detail, ConfigAttributeError | ConfigKeyError):
        return unknown_key(path, schema, RUNS[script], shown)
    empty = re.search(r"issing mandatory value: (\S+)|to missing node '?([\w.]+)", str(detail))
    if empty is not None:
        return no_value(empty.group(1) or empty.group(2))
    if closed and isinstance(detail, ValidationError) and detail.key in keys(schema):
        value = shown if "=" in shown else f"{path}={detail.value}"
        return f"{value}: must be {describe(schema, str(detail.key))}."
    return f"{shown}: {str(detail).splitlines()[0]}."


def _bad_override(error: CompactHydraException, script: str, arguments: list[str]) -> str:
    named = re.search(r"Could not override '([^']+)'", str(error))
    if named is None:
        return " ".join(str(error).split())
    group, shown = named.group(1), _written(named.group(1), arguments)
    if script == "serve" and group == "drafter":
        return f"{shown}: serve.py runs a trained drafter. Set drafter.path=EXPORT; see --help for others."
    return f"{shown}: {script}.py has no group {group!r}. Groups: {', '.join(GROUPS[script])}."
