"""Suffix decoding: what followed the longest suffix that occurred before, in the request or in past answers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from runtime.proposers.automaton import SuffixAutomaton
from runtime.proposers.base import Budget, Proposer
from runtime.proposers.lookup import best_first
from runtime.tree import DraftTree

PAST_TOKENS = 1 << 16  # most tokens of past answers kept
CONTEXT = 64  # tokens of a prompt looked up in past answers
LEVELS = 2  # suffixes looked at per text: the longest that occurred, and the next shorter one that occurred elsewhere
WIDEST = 16  # most continuations looked at per suffix, in the order they were first seen
DOUBT = 2.0  # a match of n tokens is right n times of n + DOUBT, where all its occurrences agree
END = -1  # stands between past answers, so that no match runs from one into the next

Place = tuple[SuffixAutomaton, int, int, int]  # text, state, tokens matched, how many may still be drafted


@dataclass
class _Row:
    """A request: its own text, its answer so far, and its longest match in each past text."""

    text: SuffixAutomaton
    root: int
    answer: list[int]
    matches: list[tuple[SuffixAutomaton, int, int]]


class SuffixProposer(Proposer):
    """A tree grown by how often each continuation followed (SuffixDecoding, arXiv 2411.04975).

    A token's chance after a suffix of n tokens: its share of the occurrences times n / (n + DOUBT); of several
    suffixes the one that promises most counts. A match of n tokens is drafted at most n tokens deep. Past answers
    live in two halves of at most past_tokens / 2; when the younger is full it becomes the older, whose text goes.
    """

    name = "suffix"

    def __init__(self, past_tokens: int = PAST_TOKENS) -> None:
        """past_tokens: most tokens of past answers kept, at least 4."""
        self.half = past_tokens // 2
        self._past = [SuffixAutomaton()]  # the younger first
        self._rows: dict[int, _Row] = {}

    def start(self, row: int, prompt: list[int], token: int, taps: Tensor | None) -> None:
        state = self._rows[row] = _Row(SuffixAutomaton(), token, [token], [(past, 0, 0) for past in self._past])
        for known in prompt:
            state.text.extend(known)
        state.text.extend(token)
        for recent in [*prompt, token][-CONTEXT:]:
            self._match(state, recent)

    def commit(self, row: int, tokens: list[int], taps: Tensor | None) -> None:
        state = self._rows[row]
        for token in tokens:
            state.text.extend(token)
            self._match(state, token)
        state.answer += tokens
        state.root = tokens[-1]

    def release(self, row: int) -> None:
        """Remembers the answer for later requests."""
        answer = self._rows.pop(row).answer[-(self.half - 1) :]
        if self._past[0].size + len(answer) + 1 > self.half:
            self._past = [SuffixAutomaton(), self._past[0]]
            for state in self._rows.values():
                kept = [match for match in state.matches if match[0] is self._past[1]]
                state.matches = [(self._past[0], 0, 0), *kept]
        for token in (*answer, END):
            self._past[0].extend(token)

    def propose(self, budgets: dict[int, Budget]) -> dict[int, DraftTree]:
        return {row: self._tree(self._rows[row], budget) for row, budget in budgets.items()}

    @staticmethod
    def _match(state: _Row, token: int) -> None:
        state.matches = [(past, *past.step(at, length, token)) for past, at, length in state.matches]

    def _tree(self, row: _Row, budget: Budget) -> DraftTree:
        text = row.text
        # The whole text ends where it ends; its longest suffix that occurred before is one link up.
        places = _levels(text, text.links[text.last], text.lengths[text.links[text.last]])
        for past, at, length in row.matches:
            places += _levels(past, past.shrink(at, length), length)
        return best_first(row.root, places, _continuations, budget, self.name)


def _levels(text: SuffixAutomaton, state: int, length: int) -> list[Place]:
    places = []
    while state > 0 and len(places) < LEVELS:
        places.append((text, state, length, length))
        state = text.links[state]
        length = text.lengths[state]
    return places


def _continuations(places: list[Place]) -> list[tuple[int, float, list[Place]]]:
    """The tokens after any of the places, each with its best chance and all places it leads to."""
    chances: dict[int, float] = {}
    states: dict[int, list[Place]] = {}
    for text, state, length, left in places:
        while state > 0 and not text.moves[state]:  # at the end of its text only a shorter suffix goes on
            state = text.links[state]
            length = text.lengths[state]
        if state <= 0 or not left:
            continue
        moves, counts = text.moves[state], text.counts
        if len(moves) > WIDEST:
            moves = dict(islice(moves.items(), WIDEST))
        scale = length / (length + DOUBT) / sum([counts[after] for after in moves.values()])
        for token, after in moves.items():
            if token == END:
                continue
            chance = scale * counts[after]
            if chance > chances.get(token, 0.0):
                chances[token] = chance
            states.setdefault(token, []).append((text, after, length + 1, left - 1))
    return [(token, chance, states[token]) for token, chance in chances.items()]
