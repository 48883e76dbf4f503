"""Engines over the tiny random target, and proposers that are right, wrong or random on purpose."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from runtime.engine import Engine, EngineConfig
from runtime.proposers.base import Budget, Proposer
from runtime.tree import DraftTree

PROMPTS = ["hello there", "what is 2+2?", "a", "tell me a long story about a fox", "list three colours", "why?"]


class Scripted(Proposer):
    """Knows each prompt's plain answer: drafts `right` true tokens, then a wrong one; siblings are wrong too."""

    name = "scripted"

    def __init__(self, answers: dict[tuple[int, ...], list[int]], right, vocab_size: int, siblings: int = 1):
        self.answers, self.right, self.vocab_size, self.siblings = answers, right, vocab_size, siblings
        self.rows: dict[int, list] = {}
        self.round = 0

    def start(self, row, prompt, token, taps):
        self.rows[row] = [self.answers[tuple(prompt)], 1, token]

    def propose(self, budgets: dict[int, Budget]) -> dict[int, DraftTree]:
        self.round += 1
        return {row: self._tree(row, budget) for row, budget in budgets.items()}

    def _tree(self, row: int, budget: Budget) -> DraftTree:
        answer, done, root = self.rows[row]
        nodes, parents, depths, tip = [root], [-1], [0], 0
        for depth in range(1, budget.depth + 1):
            truth = answer[done + depth - 1] if done + depth - 1 < len(answer) else 0
            wrong = [(truth + 1 + i) % self.vocab_size for i in range(self.siblings)]
            good = depth <= self.right(self.round, row)
            level = wrong + ([truth] if good else [])
            for token in level:
                if len(nodes) < budget.nodes:
                    nodes.append(token)
                    parents.append(tip)
                    depths.append(depth)
            if not good or nodes[-1] != truth or depths[-1] != depth:
                break
            tip = len(nodes) - 1
        return DraftTree(tuple(nodes), tuple(parents), tuple(depths))

    def commit(self, row, tokens, taps):
        self.rows[row][1] += len(tokens)
        self.rows[row][2] = tokens[-1]

    def release(self, row):
        del self.rows[row]


class RandomTrees(Proposer):
    """Random trees of random ids: the worst drafter there is."""

    name = "random"

    def __init__(self, vocab_size: int, seed: int = 0):
        self.vocab_size, self.rng, self.roots = vocab_size, random.Random(seed), {}

    def start(self, row, prompt, token, taps):
        self.roots[row] = token

    def propose(self, budgets):
        return {row: self._tree(self.roots[row], budget) for row, budget in budgets.items()}

    def _tree(self, root: int, budget: Budget) -> DraftTree:
        tokens, parents, depths, seen = [root], [-1], [0], set()
        for _ in range(self.rng.randrange(budget.nodes)):
            parent, token = self.rng.randrange(len(tokens)), self.rng.randrange(self.vocab_size)
            if depths[parent] < budget.depth and (parent, token) not in seen:
                seen.add((parent, token))
                tokens.append(token)
                parents.append(parent)
                depths.append(depths[parent] + 1)
        return DraftTree(tuple(tokens), tuple(parents), tuple(depths))

    def commit(self, row, tokens, taps):
        self.roots[row] = tokens[-1]

    def release(self, row):
        del self.roots[row]


@pytest.fixture(scope="session")
def pristine(tiny_target):
    """The tiny target's model as transformers made it, before any engine touched it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_target.folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def make_engine(tiny_target):
    def make(proposer: Proposer, **settings) -> Engine:
        return Engine(tiny_target, proposer, EngineConfig(**settings))

    return make


@pytest.fixture(scope="session")
def random_drafter(tiny_target):
    """An untrained EAGLE-3 drafter for the tiny target."""
    from drafters.models.eagle3 import Eagle3Drafter, Eagle3Shape

    shape = Eagle3Shape(64, 64, 128, 4, 2, 16, 1e-5, 10000.0, 2048, 512, 300)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        drafter = Eagle3Drafter(shape)
    kept = torch.zeros(512, dtype=torch.bool)
    kept[:300] = True
    drafter.bind_vocab(torch.zeros(300, dtype=torch.long), kept)
    drafter.bind_embedding(tiny_target.embed_weight)
    return drafter


@pytest.fixture
def eagle(random_drafter):
    from runtime.proposers.eagle import EagleProposer

    return EagleProposer(copy.deepcopy(random_drafter).eval(), (2, 4, 5), top_k=4, depth=5)
