"""Drafters whose acceptance is known beforehand, and the prompts they are tried on."""

from __future__ import annotations

import torch

from drafters.corpus import Prompt
from drafters.models.eagle3 import Eagle3Drafter, Eagle3Shape
from runtime.proposers.base import Budget, Proposer
from runtime.tree import DraftTree

PROMPTS = [
    Prompt("a", "chat", ({"role": "user", "content": "hello there"},)),
    Prompt("b", "maths", ({"role": "user", "content": "what is 2 + 2?"},)),
    Prompt("c", "chat", ({"role": "user", "content": "x"},)),
]
NEW = 10  # tokens per answer: the prompt gives the first, the rounds the other nine


class Oracle(Proposer):
    """Knows what plain decoding will say; `known` limits the prompts, `wrong_at` spoils one depth."""

    name = "oracle"

    def __init__(self, answers: list, known: int, wrong_at: int | None):
        self.answers = {tuple(a.prompt_ids): a.token_ids for a in answers[:known]}
        self.wrong_at = wrong_at
        self.rows: dict[int, tuple[list[int], int, int]] = {}

    def start(self, row, prompt, token, taps):
        self.rows[row] = (self.answers.get(tuple(prompt), []), 1, token)

    def propose(self, budgets: dict[int, Budget]) -> dict[int, DraftTree]:
        trees = {}
        for row, budget in budgets.items():
            answer, done, last = self.rows[row]
            drafts = answer[done : done + budget.depth]
            if self.wrong_at is not None and len(drafts) >= self.wrong_at:
                drafts[self.wrong_at - 1] = (drafts[self.wrong_at - 1] + 1) % 512
            trees[row] = DraftTree.chain(last, drafts)
        return trees

    def commit(self, row, tokens, taps):
        answer, done, _ = self.rows[row]
        self.rows[row] = (answer, done + len(tokens), tokens[-1])

    def release(self, row):
        del self.rows[row]


def random_drafter() -> Eagle3Drafter:
    """A drafter for the tiny target with weights from a seed."""
    torch.manual_seed(0)
    drafter = Eagle3Drafter(Eagle3Shape(64, 64, 128, 4, 2, 16, 1e-5, 1e4, 2048, 512, 300))
    kept = torch.zeros(512, dtype=torch.bool)
    kept[:300] = True
    drafter.bind_vocab(torch.zeros(300, dtype=torch.long), kept)
    return drafter
