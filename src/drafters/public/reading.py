"""How a public folder may be read: a shape, the tensors under our own names, and which hidden states feed it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.models.base import DrafterShape

UNKNOWN_STEPS = 7  # draft steps of the official EAGLE-3 trainer; no public format says what a drafter was trained for


@dataclass(frozen=True)
class Reading:
    """One way to take the numbers of a folder. title: what is special about it; tensors: under the drafter's own names,
    d2t and t2d among them; taps: `hidden_states` indices."""

    title: str
    shape: DrafterShape
    tensors: dict[str, Tensor]
    taps: tuple[int, ...]

    def but(self, title: str, **changes: Any) -> Reading:
        """This reading with some fields, or some of the shape's flags, changed."""
        own = {key: value for key, value in changes.items() if key in self.__dataclass_fields__}
        flags = {key: value for key, value in changes.items() if key not in own}
        return replace(self, title=title, shape=replace(own.pop("shape", self.shape), **flags), **own)


@dataclass(frozen=True)
class Doubt:
    """What a format rules out and a damaged drafter would need: only measured, to say what is wrong, never taken."""

    title: str
    changes: dict[str, Any]  # as for Reading.but

    def of(self, reading: Reading) -> Reading:
        """The reading as it would be."""
        return reading.but(f"{reading.title}, {self.title}", **self.changes)


@dataclass(frozen=True)
class PublicDrafter:
    """A drafter made elsewhere. readings: those its format leaves open, the likeliest first; one of them is taken.

    names: the file's name of each tensor. steps: draft steps it was trained for, as far as is known.
    """

    folder: Path
    dialect: str
    family: str
    readings: tuple[Reading, ...]
    doubts: tuple[Doubt, ...]
    names: dict[str, str]
    steps: int = UNKNOWN_STEPS

    @property
    def shape(self) -> DrafterShape:
        """The shape by the likeliest reading."""
        return self.readings[0].shape

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by the likeliest reading, under the drafter's own names."""
        return self.readings[0].tensors

    @property
    def taps(self) -> tuple[tuple[int, ...], ...]:
        """The candidates for its taps, the likeliest first."""
        return tuple(dict.fromkeys(reading.taps for reading in self.readings))
