"""What every settings class is made of."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from drafters.errors import ConfigError


def option(
    default: Any,
    *,
    choices: tuple[str, ...] | None = None,
    words: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """Dataclass field with the values config_check allows: one of `choices`, low <= x <= high, above < x < below.

    words: texts allowed beside whole numbers, in a field typed Any.
    """
    metadata = {"choices": choices, "words": words, "low": low, "high": high, "above": above, "below": below}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Section:
    """Base of every settings dataclass; config_check.freeze makes one read-only.

    typed: what is written on the command line for a field whose own name cannot be.
    """

    typed: ClassVar[dict[str, str]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if "_frozen" in self.__dict__:
            raise ConfigError(
                f"{type(self).__name__}.{name} is fixed once the settings are checked. "
                f"Set it on the command line, or make a copy with dataclasses.replace."
            )
        object.__setattr__(self, name, value)
