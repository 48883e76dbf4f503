"""Counters of one request or many; every rate is derived from sums."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Stats:
    """Raw counts. rounds: target forwards in decode; emitted: tokens they gave, after any cut by a stop.

    accepted_at[k]: rounds in which the draft at depth k + 1 was accepted and emitted.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def count(self, drafted: int, accepted: int, emitted: int) -> None:
        """Adds one round."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += emitted
        self.accepted_at += [0] * (accepted - len(self.accepted_at))
        for depth in range(accepted):
            self.accepted_at[depth] += 1

    def add(self, other: Stats) -> None:
        """Adds another request's counts."""
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.emitted += other.emitted
        self.accepted_at += [0] * (len(other.accepted_at) - len(self.accepted_at))
        for depth, count in enumerate(other.accepted_at):
            self.accepted_at[depth] += count

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per target forward in decode, the bonus token included; 0 before the first round."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts per drafted token."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_at(self) -> list[float]:
        """For each depth, the share of all rounds in which it was accepted."""
        return [count / self.rounds for count in self.accepted_at] if self.rounds else []
