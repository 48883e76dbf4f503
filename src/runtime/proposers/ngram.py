"""Prompt lookup: what followed the last few tokens the other times they appeared."""

from __future__ import annotations

from torch import Tensor

from runtime.proposers.base import Budget, Proposer
from runtime.proposers.lookup import best_first
from runtime.tree import DraftTree

LONGEST = 4  # tokens of the longest suffix looked up
MATCHES = 16  # most places looked at per round
SHARPNESS = 4.0  # how much more a place counts for each token by which its match is longer
DOUBT = 2.0  # a match of n tokens is right n times of n + DOUBT, where all places agree

State = tuple[tuple[tuple[int, int], ...], tuple[int, ...]]  # (place, tokens matched) pairs, drafted path


class _Text:
    """One row's tokens and, for each place, the previous place that follows the same n-gram.

    Adding a token costs LONGEST table entries, whatever the length of the text.
    """

    def __init__(self, tokens: list[int]):
        self.ids: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}
        self._previous: list[list[int]] = [[] for _ in range(LONGEST)]
        self.extend(tokens)

    def extend(self, tokens: list[int]) -> None:
        ids, latest = self.ids, self._latest
        for token in tokens:
            place = len(ids)
            for size, previous in enumerate(self._previous, start=1):
                if size > place:
                    previous.append(-1)
                    continue
                ngram = tuple(ids[-size:])
                previous.append(latest.get(ngram, -1))
                latest[ngram] = place
            ids.append(token)

    def matches(self) -> tuple[tuple[int, int], ...]:
        """(place, tokens matched before it), the longest match first, then the latest; at most MATCHES."""
        found: dict[int, int] = {}
        for size in range(min(LONGEST, len(self.ids)), 0, -1):
            place, looked = self._latest.get(tuple(self.ids[-size:]), -1), 0
            while place >= 0 and looked < MATCHES and len(found) < MATCHES:
                found.setdefault(place, size)
                place, looked = self._previous[size - 1][place], looked + 1
        return tuple(found.items())

    def continuations(self, state: State) -> list[tuple[int, float, State]]:
        """The distinct tokens at the places of a node, the latest place first, each with its chance."""
        places, path = state
        if not places:
            return []
        groups: dict[int, list[tuple[int, int]]] = {}
        weights: dict[int, float] = {}
        for place, size in places:
            # Past the end of the text a place reads what was drafted: a text that repeats itself goes on.
            token = self.ids[place] if place < len(self.ids) else path[place - len(self.ids)]
            groups.setdefault(token, []).append((place + 1, size + 1))
            weights[token] = weights.get(token, 0.0) + SHARPNESS ** min(size, LONGEST)
        longest = max(size for _, size in places)
        scale = longest / (longest + DOUBT) / sum(weights.values())
        return [(token, scale * weights[token], (tuple(group), (*path, token))) for token, group in groups.items()]


class NgramProposer(Proposer):
    """A tree of what followed the row's last tokens before, in prompt and answer; long and frequent matches first.

    A token's chance: its share of the matches, each weighing SHARPNESS ** length, times n / (n + DOUBT) for the
    longest match of n tokens. On the way down matches grow with the path.
    """

    name = "ngram"

    def __init__(self) -> None:
        self._rows: dict[int, _Text] = {}

    def start(self, row: int, prompt: list[int], token: int, taps: Tensor | None) -> None:
        self._rows[row] = _Text([*prompt, token])

    def propose(self, budgets: dict[int, Budget]) -> dict[int, DraftTree]:
        return {row: self._tree(self._rows[row], budget) for row, budget in budgets.items()}

    def commit(self, row: int, tokens: list[int], taps: Tensor | None) -> None:
        self._rows[row].extend(tokens)

    def release(self, row: int) -> None:
        del self._rows[row]

    def _tree(self, text: _Text, budget: Budget) -> DraftTree:
        return best_first(text.ids[-1], (text.matches(), ()), text.continuations, budget, self.name)
