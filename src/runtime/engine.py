"""The engine: propose, verify, commit, for every method, batch and stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.chat import render_prompt
from drafters.errors import ConfigError
from drafters.target import Target
from runtime.forward import TargetRunner
from runtime.proposers.base import Budget, Proposer
from runtime.request import Request, Result
from runtime.sampling import SamplingParams, choose
from runtime.tree import DraftTree
from runtime.verify import verify

Prompt = str | list[int] | list[dict[str, str]]


@dataclass(frozen=True)
class EngineConfig:
    """num_draft_tokens: most nodes of a tree, the root included. depth: most drafts on a path. top_k: children per
    node. batch_size: rows decoded together. max_length: longest prompt plus answer in tokens (None: the target's)."""

    num_draft_tokens: int = 16
    depth: int = 5
    top_k: int = 4
    batch_size: int = 1
    max_length: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_draft_tokens", 1), ("depth", 1), ("top_k", 1), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"runtime.{name} is {getattr(self, name)}; set it to {least} or more.")


class Engine:
    """Decodes requests with a target and a proposer; the proposer changes the speed, never a token."""

    def __init__(self, target: Target, proposer: Proposer, config: EngineConfig):
        self.target = target
        self.proposer = proposer
        self.config = config
        self.max_length = min(config.max_length or target.max_length, target.max_length)
        self._runner: TargetRunner | None = None
        self._rows: list[Request | None] = [None] * config.batch_size
        self._waiting: deque[Request] = deque()

    @classmethod
    def load(cls, target: object, drafter: object = None, **settings: int) -> Engine:
        """An engine from a target (name, folder, hub id or Target) and a drafter (none, ngram, export or module)."""
        from runtime.loading import load_engine

        return load_engine(target, drafter, **settings)

    def generate(self, prompts: list[Prompt], params: SamplingParams | list[SamplingParams]) -> list[Result]:
        """Answers in the order of the prompts; one SamplingParams for all or one each."""
        return [result for _, result in sorted(self.complete(prompts, params), key=lambda pair: pair[0])]

    def complete(
        self, prompts: list[Prompt], params: SamplingParams | list[SamplingParams]
    ) -> Iterator[tuple[int, Result]]:
        """(index, answer) pairs as they finish."""
        each = params if isinstance(params, list) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(each)} SamplingParams; give one, or one per prompt")
        requests = [self._request(i, prompt, own) for i, (prompt, own) in enumerate(zip(prompts, each))]
        yield from ((request.index, request.result()) for request in self._run(requests))

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[str | Result]:
        """Pieces of text as they become certain, then the Result; closing it early leaves a clean engine."""
        request = self._request(0, prompt, params)
        sent = ""
        for _ in self._run([request], every_round=True):
            text = request.safe_text
            if len(text) > len(sent):
                yield text[len(sent) :]
                sent = text
        yield request.result()

    def _request(self, index: int, prompt: Prompt, params: SamplingParams) -> Request:
        ids = self.encode(prompt)
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        if len(ids) + params.max_new_tokens > self.max_length:
            raise ConfigError(
                f"prompt {index} has {len(ids)} tokens and max_new_tokens is {params.max_new_tokens}, together over "
                f"the limit of {self.max_length}. Lower eval.max_new_tokens, shorten the prompt, or raise "
                "runtime.max_length up to the target's own limit."
            )
        return Request(index, ids, params, self.target.tokenizer, self.target.eos_ids)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: ids as they are, a text as one user turn, messages by the chat template."""
        if isinstance(prompt, str):
            return render_prompt(self.target.tokenizer, [{"role": "user", "content": prompt}])
        if prompt and isinstance(prompt[0], dict):
            return render_prompt(self.target.tokenizer, prompt)
        return list(prompt)

    def _run(self, requests: list[Request], every_round: bool = False) -> Iterator[Request]:
        if any(self._rows) or self._waiting:
            raise RuntimeError("the engine is already running; finish or close the other generation first")
        self._reserve(max(request.length + request.params.max_new_tokens for request in requests) if requests else 1)
        self._waiting.extend(requests)
        try:
            while self._waiting or any(self._rows):
                finished = self.step()
                yield from requests if every_round else finished
        finally:
            self._waiting.clear()
            for row, request in enumerate(self._rows):
                if request is not None:
                    self._release(row)
                else:  # a prefill may have been interrupted half-way
                    self._runner.cache.release(row)

    def _reserve(self, length: int) -> None:
        """Makes caches that hold the longest of the requests; kept while they are large enough."""
        slots = length + self.config.num_draft_tokens
        if self._runner is None or self._runner.cache.num_slots < slots:
            slots = -(-slots // 256) * 256
            self._runner = TargetRunner(self.target, self.config.batch_size, slots, self.proposer.taps)
            self.proposer.reserve(self.config.batch_size, slots)

    def step(self) -> list[Request]:
        """One round for every running row, admitting waiting requests first; returns the finished ones."""
        finished = self._admit()
        rows = [row for row, request in enumerate(self._rows) if request is not None]
        if rows:
            trees = self.proposer.propose({row: self._budget(self._rows[row]) for row in rows})
            finished += self._verify(rows, trees)
        return finished

    def _admit(self) -> list[Request]:
        finished = []
        for row in range(len(self._rows)):
            while self._rows[row] is None and self._waiting:
                request = self._waiting.popleft()
                if self._prefill(row, request):
                    finished.append(request)
        return finished

    def _prefill(self, row: int, request: Request) -> bool:
        """Runs the prompt and emits the first token; True when that ended the request."""
        hidden, taps = self._runner.prefill(row, request.prompt_ids)
        choice = choose(self._runner.logits(hidden[0, -1:]), [request.length], request.params)
        token = int(choice[0])
        if request.push(token):
            self._runner.cache.release(row)
            return True
        self.proposer.start(row, request.prompt_ids, token, None if taps is None else taps[0])
        self._rows[row] = request
        return False

    def _budget(self, request: Request) -> Budget:
        """A round emits one token more than it accepts, so drafts stop one short of the tokens left."""
        depth = min(self.config.depth, request.remaining - 1)
        return Budget(self.config.num_draft_tokens if depth else 1, depth)

    def _verify(self, rows: list[int], trees: dict[int, DraftTree]) -> list[Request]:
        first, last = rows[0], rows[-1] + 1
        window = [trees.get(row) for row in range(first, last)]
        starts = [self._rows[row].length - 1 if row in trees else 0 for row in range(first, last)]
        hidden, taps, slots = self._runner.run(first, window, starts)
        finished = []
        for row, choices in zip(rows, self._choices(rows, first, trees, hidden)):
            if self._commit(row, trees[row], choices, slots[row - first], None if taps is None else taps[row - first]):
                finished.append(self._rows[row])
                self._release(row)
        return finished

    def _choices(self, rows: list[int], first: int, trees: dict[int, DraftTree], hidden: Tensor) -> list[list[int]]:
        """The target's own token after each node of each row."""
        nodes = torch.cat([hidden[row - first, : len(trees[row])] for row in rows])
        logits = self._runner.logits(nodes).split([len(trees[row]) for row in rows])
        picks = []
        for row, part in zip(rows, logits):
            request = self._rows[row]
            picks.append(choose(part, [request.length + depth for depth in trees[row].depths], request.params))
        return [pick.tolist() for pick in picks]

    def _commit(self, row: int, tree: DraftTree, choices: list[int], slots: list[int], taps: Tensor | None) -> bool:
        """Emits the accepted path and the bonus token; True when that ended the request."""
        request = self._rows[row]
        found = verify(tree, choices)
        tokens = [*(tree.tokens[node] for node in found.path[1:]), found.next_token]
        emitted = request.push_all(tokens)
        request.stats.count(len(tree) - 1, min(len(found.path) - 1, emitted), emitted)
        before = list(found.path[:emitted])  # the node before each emitted token
        self.proposer.commit(row, tokens[:emitted], None if taps is None else taps[before])
        if request.finish_reason is not None:
            return True
        self._runner.cache.commit(row, slots, [slots[node] for node in found.path])
        return False

    def _release(self, row: int) -> None:
        self._runner.cache.release(row)
        self.proposer.release(row)
        self._rows[row] = None
