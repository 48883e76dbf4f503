"""A suffix automaton that counts: every substring of a text, and how often each occurs, in linear space."""

from __future__ import annotations

MOST = 64  # occurrences are counted up to here, which bounds the work per token


class SuffixAutomaton:
    """States are sets of substrings that end at the same places (Blumer et al. 1985); state 0 is the empty text.

    moves[s]: token -> state; links[s]: the state of the longest suffix with more occurrences (-1 at 0); lengths[s]:
    tokens of the state's longest substring; counts[s]: its occurrences, at most MOST. Adding a token costs amortised
    O(1) moves and at most MOST counts: along the links counts grow by at least one a step, so it stops at MOST.
    """

    def __init__(self) -> None:
        self.moves: list[dict[int, int]] = [{}]
        self.links = [-1]
        self.lengths = [0]
        self.counts = [MOST]  # never counted further
        self.size = 0  # tokens
        self.last = 0  # state of the whole text

    def extend(self, token: int) -> None:
        """Adds one token to the text."""
        moves, links, lengths = self.moves, self.links, self.lengths
        new = self._state({}, 0, self.size + 1, 0)
        state = self.last
        while state != -1 and token not in moves[state]:
            moves[state][token] = new
            state = links[state]
        if state != -1:
            links[new] = self._exact(state, token, lengths[state] + 1)
        self.last = new
        self.size += 1
        state = new
        while self.counts[state] < MOST:
            self.counts[state] += 1
            state = links[state]

    def _exact(self, state: int, token: int, length: int) -> int:
        """The state whose longest substring is state's plus the token; split off from a longer one where needed."""
        old = self.moves[state][token]
        if self.lengths[old] == length:
            return old
        clone = self._state(dict(self.moves[old]), self.links[old], length, self.counts[old])
        self.links[old] = clone
        while state != -1 and self.moves[state].get(token) == old:
            self.moves[state][token] = clone
            state = self.links[state]
        return clone

    def _state(self, moves: dict[int, int], link: int, length: int, count: int) -> int:
        self.moves.append(moves)
        self.links.append(link)
        self.lengths.append(length)
        self.counts.append(count)
        return len(self.links) - 1

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Longest suffix of (a substring of `length` tokens in `state`, token) that occurs: its state and length."""
        moves, links, lengths = self.moves, self.links, self.lengths
        state = self.shrink(state, length)
        while state and token not in moves[state]:
            state = links[state]
            length = lengths[state]
        if token not in moves[state]:
            return 0, 0
        return moves[state][token], length + 1

    def shrink(self, state: int, length: int) -> int:
        """The state that holds the suffix of `length` tokens of `state`, which a split may have moved down a link."""
        while state and length <= self.lengths[self.links[state]]:
            state = self.links[state]
        return state
