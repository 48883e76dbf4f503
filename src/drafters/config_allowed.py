"""What may be set: the keys of each schema, their kinds and ranges in words, and what to say of any other."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drafters.config import FAMILIES, DistillRun, TrainRun
from drafters.config_base import Section
from drafters.errors import ConfigError

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def keys(schema: type) -> list[str]:
    """Names of the settings of one section."""
    return [field.name for field in dataclasses.fields(schema)]


def leaves(schema: type, prefix: str = "") -> Iterator[tuple[str, type, str]]:
    """(key path, section type, name) of every setting below a run type, the families of each group included."""
    hints = typing.get_type_hints(schema)
    for name in keys(schema):
        path = f"{prefix}{name}"
        inner = _section_type(hints[name])
        families = FAMILIES.get(path, {}) if schema is TrainRun or schema is DistillRun else {}
        if inner is None:
            yield path, schema, name
        for section in families.values() or ([inner] if inner else []):
            yield from leaves(section, f"{path}.")


def _section_type(hint: Any) -> type[Section] | None:
    for part in (hint, *typing.get_args(hint)):
        if isinstance(part, type) and issubclass(part, Section):
            return part
    return None


def describe(schema: type, name: str) -> str:
    """What one setting accepts, in words: its type, range and choices."""
    field = next(field for field in dataclasses.fields(schema) if field.name == name)
    hint = typing.get_type_hints(schema)[name]
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
    optional = type(None) in typing.get_args(hint)
    base = parts[0] if optional else hint
    rule = field.metadata
    if rule.get("words"):
        base = int
    if rule.get("choices"):
        text = "one of " + ", ".join(rule["choices"])
    elif typing.get_origin(base) is list:
        text = "a list, each entry " + KINDS[typing.get_args(base)[0]]
    elif typing.get_origin(base) is dict:
        text = "a mapping of text to text"
    else:
        text = KINDS.get(base, "a group of settings: " + ", ".join(keys(base)) if _section_type(base) else "a value")
    signs = {"low": ">=", "above": ">", "high": "<=", "below": "<"}
    limits = [f"{sign} {rule[kind]:g}" for kind, sign in signs.items() if rule.get(kind) is not None]
    others = [*rule.get("words", ()), *(["null"] if optional else [])]
    return " or ".join([" ".join([text, " and ".join(limits)]).strip(), *others])


def suggest(path: str, run_type: type, allowed: list[str]) -> str:
    """'Did you mean ...? ' for an unknown key path, from its own section and from the whole run; '' when far off."""
    section, _, name = path.rpartition(".")
    prefix = f"{section}." if section else ""
    everywhere = {leaf: where for where, _, leaf in leaves(run_type)}
    initials = {"".join(word[0] for word in leaf.split("_")): leaf for leaf in [*everywhere, *allowed]}
    for pool in (allowed, list(everywhere)):
        wanted = initials.get(name, name)
        close = [wanted] if wanted in pool else difflib.get_close_matches(name, pool, n=1, cutoff=0.7)
        if close:
            return f"Did you mean {prefix + close[0] if pool is allowed else everywhere[close[0]]}? "
    return ""


def unknown_key(path: str, schema: type, run_type: type, shown: str) -> str:
    """Message for a key that its section does not have; `shown` is what the user wrote."""
    section = path.rpartition(".")[0]
    others = [name for name, family in FAMILIES.get(section, {}).items() if path.rpartition(".")[2] in keys(family)]
    option = next((name for name, family in FAMILIES.get(section, {}).items() if family is schema), None)
    where = f"{section}={option}" if option else section or "the top level"
    hint = f"It belongs to {section}={others[0]}. " if others else suggest(path, run_type, keys(schema))
    allowed = ", ".join(schema.typed.get(name, name) for name in keys(schema))
    return f"{shown}: {where} has no key {path.rpartition('.')[2]!r}. {hint}Allowed: {allowed}."


def no_value(path: str) -> str:
    """Message for a setting or group that was given no value."""
    return f"{path} has no value. Set {path}={'VALUE' if '.' in path else 'OPTION'}."


def refuse_extra_keys(cfg: DictConfig) -> None:
    """Raise ConfigError for a key that `+key=value` slipped past the closed schema."""
    run_type = OmegaConf.get_type(cfg)

    def walk(node: DictConfig, prefix: str) -> None:
        schema = OmegaConf.get_type(node)
        if not (isinstance(schema, type) and issubclass(schema, Section)):
            return
        for key in node:
            path = f"{prefix}{key}"
            if key not in keys(schema):
                raise ConfigError(unknown_key(path, schema, run_type, path))
            if not OmegaConf.is_missing(node, key) and OmegaConf.is_dict(node._get_node(key)) and node[key] is not None:
                walk(node[key], f"{path}.")

    walk(cfg, "")
