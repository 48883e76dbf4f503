"""Counters of one request or many; every rate is derived from sums."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, fields

from runtime.tree import DraftTree

PARTS = ("draft", "verify", "sample", "rest")
FINE = 0.01  # buckets of times are this much wider one after another: a percentile is right to half of it
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass
class Times:
    """How long something took, as counts of log-spaced buckets: percentiles in memory that does not grow."""

    counts: Counter[int] = field(default_factory=Counter)

    def record(self, seconds: float, count: int = 1) -> None:
        """Adds `count` events of so many seconds each."""
        self.counts[round(math.log(max(seconds, 1e-9)) / math.log1p(FINE))] += count

    def quantile(self, share: float) -> float:
        """Seconds that `share` of the events did not exceed (nearest rank), right to FINE / 2; 0 without events."""
        rank = share * self.counts.total()
        seen = 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= rank:
                return (1 + FINE) ** bucket
        return 0.0

    def percentiles(self) -> dict[str, float]:
        """Seconds by p50, p95 and p99."""
        return {name: self.quantile(share) for name, share in QUANTILES.items()}


@dataclass
class RoundTime:
    """Seconds of one round by what they were spent on, `rest` being commits and all else; no prompt's own forward."""

    draft: float = 0.0
    verify: float = 0.0
    sample: float = 0.0
    rest: float = 0.0

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.sample + self.rest


@dataclass
class Stats:
    """Raw counts. rounds: target forwards in decode; emitted: tokens they gave, after any cut by a stop.

    accepted_at[k]: rounds in which the draft at depth k + 1 was accepted and emitted. drafted_by, accepted_by: drafts
    by who proposed them; drafted_rank[r], accepted_rank[r]: by place among siblings, best first. chosen_n[n]: rounds
    with n drafts, 0 being plain decoding. predicted: tokens the cost model expected, predicted_for: tokens emitted in
    the rounds it expected something of. near_ties: answers that leave plain decoding where the target was undecided.
    seconds: of the rounds by part, a round of several rows shared among them, so that sums are wall time; token_time,
    round_time: whole times as the request saw them.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    drafted_by: Counter[str] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)
    drafted_rank: list[int] = field(default_factory=list)
    accepted_rank: list[int] = field(default_factory=list)
    chosen_n: Counter[int] = field(default_factory=Counter)
    predicted: float = 0.0
    predicted_for: int = 0
    near_ties: int = 0
    seconds: Counter[str] = field(default_factory=Counter)
    token_time: Times = field(default_factory=Times)
    round_time: dict[str, Times] = field(default_factory=lambda: {name: Times() for name in ("round", *PARTS)})

    def count(self, drafted: int, accepted: int, emitted: int) -> None:
        """Adds one round's numbers."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += emitted
        _bump(self.accepted_at, range(accepted))

    def verified(self, tree: DraftTree, path: tuple[int, ...], emitted: int, predicted: float | None = None) -> None:
        """Adds one round: the verified tree, its accepted nodes (root first) and how many tokens were emitted.

        An accepted draft that a stop cut off was not emitted and does not count as accepted. predicted: tokens the
        cost model expected; None: it was not asked.
        """
        taken = path[1 : emitted + 1]
        self.count(len(tree) - 1, len(taken), emitted)
        self.chosen_n[len(tree) - 1] += 1
        ranks = _ranks(tree)
        _bump(self.drafted_rank, ranks[1:])
        _bump(self.accepted_rank, [ranks[node] for node in taken])
        self.drafted_by.update(tree.sources[1:])
        self.accepted_by.update(tree.sources[node] for node in taken if tree.sources)
        if predicted is not None:
            self.predicted += predicted
            self.predicted_for += emitted

    def time(self, took: RoundTime, emitted: int, rows: int) -> None:
        """Adds the time of a round in which this request emitted `emitted` tokens and `rows` rows ran together."""
        for name in PARTS:
            self.seconds[name] += getattr(took, name) / rows
            self.round_time[name].record(getattr(took, name))
        self.round_time["round"].record(took.total)
        if emitted:
            self.token_time.record(took.total / emitted, emitted)

    def add(self, other: Stats) -> None:
        """Adds another request's counts."""
        for item in fields(Stats):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            elif isinstance(mine, list):
                mine += [0] * (len(theirs) - len(mine))
                for index, count in enumerate(theirs):
                    mine[index] += count
            elif isinstance(mine, Times):
                mine.counts.update(theirs.counts)
            elif isinstance(mine, dict):
                for name, times in theirs.items():
                    mine[name].counts.update(times.counts)
            else:
                setattr(self, item.name, mine + theirs)

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

    @property
    def time_share(self) -> dict[str, float] | None:
        """Share of the rounds' time by part, summing to 1; None where no round was timed."""
        total = self.seconds.total()
        return {name: self.seconds[name] / total for name in PARTS} if total else None

    @property
    def by_proposer(self) -> dict[str, dict[str, int]]:
        """Drafted and accepted tokens of each proposer."""
        names = sorted(self.drafted_by)
        return {name: {"drafted": self.drafted_by[name], "accepted": self.accepted_by[name]} for name in names}


def _ranks(tree: DraftTree) -> list[int]:
    """Each node's place among its siblings, from 0; siblings stand in the order of their numbers, best first."""
    seen: Counter[int] = Counter()
    ranks = []
    for parent in tree.parents:
        ranks.append(seen[parent])
        seen[parent] += 1
    return ranks


def _bump(counts: list[int], places: range | list[int]) -> None:
    for place in places:
        counts += [0] * (place + 1 - len(counts))
        counts[place] += 1
