"""The engine: propose, verify, commit, for every method, batch and stream."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from drafters.chat import render_prompt
from drafters.config import TREES
from drafters.errors import ConfigError
from drafters.target import Target
from drafters.target_sources import cache_dir
from runtime.calibration import Calibration
from runtime.cost import AUTO_NODES, CostModel
from runtime.cost_probe import probes
from runtime.cost_table import CostTable, cost_key, measure, remembered
from runtime.debug import Audit
from runtime.footprint import described
from runtime.forward import TargetRunner
from runtime.metrics import RoundTime
from runtime.processors import Processors
from runtime.proposers.base import Budget, Proposer
from runtime.proposers.none import NoneProposer
from runtime.request import Request, Result
from runtime.rules import decide
from runtime.sampling import DraftNoise, Noise, SamplingParams, drawing_noise, require_choice
from runtime.tree import DraftTree
from runtime.verify import Verification, verify

log = logging.getLogger(__name__)
AUTO = "auto"

Prompt = str | list[int] | list[dict[str, str]]


@dataclass(frozen=True)
class EngineConfig:
    """num_draft_tokens: most nodes of a tree, the root included; "auto": each round as many as pay, none among the
    choices. depth: most drafts on a path. top_k: children per node. tree: dynamic, or static for drafters with heads:
    greedy rows' trees have one shape, the best by the heads' accuracies. batch_size: rows decoded together. max_length:
    longest prompt plus answer in tokens (None: the target's). debug: after every round all state is computed again
    from the text and compared."""

    num_draft_tokens: int | str = 16
    depth: int = 5
    top_k: int = 6
    tree: str = "dynamic"
    batch_size: int = 1
    max_length: int | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.num_draft_tokens, str) and self.num_draft_tokens != AUTO:
            raise ConfigError(f"runtime.num_draft_tokens is {self.num_draft_tokens!r}; set it to a number or {AUTO}.")
        if self.tree not in TREES:
            raise ConfigError(f"runtime.tree is {self.tree!r}; set it to one of {', '.join(TREES)}.")
        if self.tree == "static" and self.num_draft_tokens == AUTO:
            raise ConfigError(
                f"runtime.tree=static needs a number of nodes, but runtime.num_draft_tokens is {AUTO}. Set "
                "runtime.num_draft_tokens to a number, or runtime.tree=dynamic."
            )
        for name in ("nodes", "depth", "top_k", "batch_size"):
            if getattr(self, name) < 1:
                shown = "num_draft_tokens" if name == "nodes" else name
                raise ConfigError(f"runtime.{shown} is {getattr(self, name)}; set it to 1 or more.")

    @property
    def nodes(self) -> int:
        """Most nodes a tree may have."""
        return AUTO_NODES if self.num_draft_tokens == AUTO else self.num_draft_tokens


class Engine:
    """Decodes requests with a target and a proposer; the proposer changes the speed, never a token."""

    def __init__(
        self, target: Target, proposer: Proposer, config: EngineConfig, calibration: Calibration | None = None
    ):
        """calibration: the one a merging proposer ranks by; None: the engine's own."""
        self.target = target
        self.proposer = proposer
        self.config = config
        self.calibration = calibration or Calibration()
        self.cost: CostModel | None = None  # made with the first caches, where num_draft_tokens is auto
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
        params.check_vocabulary(self.target.vocab_size)
        device = self.target.device
        noise = Noise(params.seed, self.target.vocab_size, device) if params.temperature else None
        processors = Processors.build(params, len(ids), self.target.eos_ids, device)
        return Request(index, ids, params, self.target.tokenizer, self.target.eos_ids, noise, processors)

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
        slots = length + self.config.nodes
        if self._runner is None or self._runner.cache.num_slots < slots:
            slots = -(-slots // 256) * 256
            rows = self.config.batch_size
            self._runner = TargetRunner(self.target, rows, slots, self.proposer.taps, self.config.debug)
            self.proposer.reserve(rows, slots)
        if self.cost is None and self.config.num_draft_tokens == AUTO and not isinstance(self.proposer, NoneProposer):
            self.cost = self._measured()

    def _measured(self) -> CostModel:
        """A cost model from forwards and drafts timed now, or on this machine before."""
        rows, nodes, depth = sizes = (self.config.batch_size, self.config.nodes, self.config.depth)
        key = cost_key(self.target, described(self.proposer), sizes, self.config.top_k)
        with probes(self._runner, self.proposer, rows, nodes) as (verify_probe, draft_probe):
            found = remembered(cache_dir() / "costs", key, lambda: measure(verify_probe, draft_probe, sizes))
        table = CostTable(found, rows, nodes, depth)
        log.info("costs: %s", table.summary())
        return CostModel(table, self.calibration, depth, self.proposer.asks)

    def step(self) -> list[Request]:
        """One round for every running row, admitting waiting requests first; returns the finished ones."""
        finished = self._admit()
        rows = [row for row, request in enumerate(self._rows) if request is not None]
        if rows:
            finished += self._round(rows)
        return finished

    def _round(self, rows: list[int]) -> list[Request]:
        """Propose, verify, commit; counts and times the round. Returns the requests that it finished."""
        requests = {row: self._rows[row] for row in rows}
        began = perf_counter()
        budgets = {row: self._budget(request) for row, request in requests.items()}
        trees = self.proposer.propose(self.cost.plan(budgets) if self.cost else budgets)
        if self.cost:
            trees = self.cost.trim(trees)
        drafted = perf_counter()
        taps, slots, logits = self._verify(rows, trees)
        verified = perf_counter()
        found = dict(zip(rows, self._decisions(rows, trees, logits)))
        sampled = perf_counter()
        emitted = {row: self._commit(row, trees[row], found[row], slots[row], taps.get(row)) for row in rows}
        for row in rows:
            if self._rows[row].finish_reason is not None:
                self._release(row)
        ended = perf_counter()
        took = RoundTime(drafted - began, verified - drafted, sampled - verified, ended - sampled)
        self._observe(requests, trees, found, emitted, budgets, took)
        if self.config.debug:
            running = {row: request for row, request in enumerate(self._rows) if request is not None}
            Audit(self._runner, self.proposer).check({row: [*r.prompt_ids, *r.token_ids] for row, r in running.items()})
        return [request for request in requests.values() if request.finish_reason is not None]

    def _observe(
        self,
        requests: dict[int, Request],
        trees: dict[int, DraftTree],
        found: dict[int, Verification],
        emitted: dict[int, int],
        budgets: dict[int, Budget],
        took: RoundTime,
    ) -> None:
        """Tells the statistics, and what learns from rounds, how this one went."""
        for row, request in requests.items():
            predicted = self.cost.expected[row] if self.cost else None
            request.stats.verified(trees[row], found[row].path, emitted[row], predicted)
            request.stats.time(took, emitted[row], len(requests))
        if self.cost:
            paths = {row: each.path for row, each in found.items()}
            self.cost.observe(trees, paths, took.draft, took.total - took.draft)
        else:
            for row, tree in trees.items():
                self.calibration.update(tree, found[row].path, budgets[row].noise is not None)

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
        last = DraftTree.root(request.prompt_ids[-1])
        token = self._decide(request, last, self._runner.logits(hidden[0, -1:])).next_token
        if request.push(token):
            self._runner.cache.release(row)
            return True
        self.proposer.start(row, request.prompt_ids, token, None if taps is None else taps[0])
        self._rows[row] = request
        return False

    def _budget(self, request: Request) -> Budget:
        """A round emits one token more than it accepts, so drafts stop one short of the tokens left."""
        depth = min(self.config.depth, request.remaining - 1)
        nodes = self.config.nodes if depth else 1
        params, root = request.params, request.length - 1
        if request.noise is None or params.verification == "typical":  # that rule draws with chances of its own
            return Budget(nodes, depth)
        if params.verification == "coupled":
            return Budget(nodes, depth, DraftNoise(request.noise, root, params.temperature))
        noise = drawing_noise(params.seed, request.noise.size, root, params.temperature, request.noise.device)
        return Budget(nodes, depth, noise, drawn=True)

    def _verify(
        self, rows: list[int], trees: dict[int, DraftTree]
    ) -> tuple[dict[int, Tensor], dict[int, list[int]], Tensor]:
        """Runs the trees: taps and slots of each row's nodes, and logits of all rows' nodes one after another."""
        first, last = rows[0], rows[-1] + 1
        window = [trees.get(row) for row in range(first, last)]
        starts = [self._rows[row].length - 1 if row in trees else 0 for row in range(first, last)]
        hidden, taps, slots = self._runner.run(first, window, starts)
        logits = self._runner.logits(torch.cat([hidden[row - first, : len(trees[row])] for row in rows]))
        if logits.is_cuda:  # what follows waits for the device anyway; here the wait counts as the forward's
            torch.cuda.synchronize(logits.device)
        of_rows = {} if taps is None else {row: taps[row - first] for row in rows}
        return of_rows, {row: slots[row - first] for row in rows}, logits

    def _decisions(self, rows: list[int], trees: dict[int, DraftTree], logits: Tensor) -> list[Verification]:
        """What each row accepts, and its next token."""
        sizes = [len(trees[row]) for row in rows]
        parts = logits.split(sizes)
        if self.proposer.wants_logits:
            for row, part in zip(rows, parts):
                self.proposer.observe(row, trees[row], part)
        requests = [self._rows[row] for row in rows]
        if any(request.processors or request.noise for request in requests):
            return [self._decide(self._rows[row], trees[row], part) for row, part in zip(rows, parts)]
        # All greedy: one transfer from the device for all rows.
        positions = [request.length + depth for request, row in zip(requests, rows) for depth in trees[row].depths]
        require_choice(logits, positions)
        choices = logits.argmax(-1).split(sizes)
        return [verify(trees[row], choice.tolist()) for row, choice in zip(rows, choices)]

    @staticmethod
    def _decide(request: Request, tree: DraftTree, logits: Tensor) -> Verification:
        ids = [*request.prompt_ids, *request.token_ids] if request.processors else ()
        return decide(tree, logits, request.params, request.noise, request.length - 1, request.processors, ids)

    def _commit(
        self, row: int, tree: DraftTree, found: Verification, slots: list[int], taps: Tensor | None
    ) -> int:
        """Emits the accepted path and the bonus token up to the request's end; returns how many were emitted."""
        request = self._rows[row]
        tokens = [*(tree.tokens[node] for node in found.path[1:]), found.next_token]
        emitted = request.push_all(tokens)
        before = list(found.path[:emitted])  # the node before each emitted token
        self.proposer.commit(row, tokens[:emitted], None if taps is None else taps[before])
        if request.finish_reason is None:
            self._runner.cache.commit(row, slots, [slots[node] for node in found.path])
            if request.noise is not None:
                request.noise.forget(before=request.length)
        return emitted

    def _release(self, row: int) -> None:
        self._runner.cache.release(row)
        self.proposer.release(row)
        self._rows[row] = None
