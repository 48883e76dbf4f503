"""A smaller language model with the target's tokenizer drafts: a chain of its choices, with runners-up beside it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

from drafters.config import TargetConfig
from drafters.contract import hash_tokenizer
from drafters.errors import ContractError
from drafters.models.small import SmallDrafter
from drafters.target import Target
from runtime.debug import cache_state, recompute
from runtime.forward import TargetRunner
from runtime.proposers.base import Budget, Held, Proposer
from runtime.proposers.growth import draft_log_probs, goes_deeper, rank
from runtime.tree import DraftTree

log = logging.getLogger(__name__)
SLOW = 1 / 3  # of a target step; a draft step above it hardly ever pays
TIMED = 5  # steps timed after a first that is not


@dataclass
class _Row:
    """length: committed tokens in the model's cache; pending: those not yet there, the last of them the root."""

    length: int
    pending: list[int]


@dataclass
class _Draft:
    """The tree being drafted for a row; chain: the first choices of the levels so far."""

    root: int
    budget: Budget
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=lambda: [0.0])
    chain: list[int] = field(default_factory=list)
    drawn_from: dict[int, Tensor] = field(default_factory=dict)  # node -> fp64 [V]
    tip: int = 0  # the chain's last node

    def branch(self, tokens: list[int], logs: list[float]) -> None:
        """Adds children of the chain's last node, best first; the first becomes the chain's last node."""
        parent, level = self.tip, self.depths[self.tip] + 1
        self.tip = len(self.parents)
        self.tokens += tokens
        self.scores += [self.scores[parent] + log_chance for log_chance in logs]
        self.parents += [parent] * len(tokens)
        self.depths += [level] * len(tokens)
        self.chain.append(tokens[0])

    def tree(self, source: str, vocab_size: int) -> DraftTree:
        """What was drafted, drawn_from as draft_probs."""
        probs = None
        if self.drawn_from:
            probs = torch.zeros(len(self.parents), vocab_size, dtype=torch.float64)
            for node, row in self.drawn_from.items():
                probs[node] = row
        return DraftTree(
            (self.root, *self.tokens),
            tuple(self.parents),
            tuple(self.depths),
            tuple(self.scores),
            ("", *[source] * len(self.tokens)),
            probs,
        )


class SmallProposer(Proposer):
    """A smaller causal LM on slots of its own; its state is rebuilt from committed tokens alone.

    Level by level: at the chain's last node the best tokens become children, and the first of them goes on. Ranks are
    growth.rank's: log q, with the target's noise where it is given (coupled drafting). A drawn row gets its children
    drawn without replacement, as many per level as the budget says beforehand, and the distribution they came from.
    """

    name = "small"
    asks = True

    def __init__(self, model: Target, vocab_size: int, top_k: int, target_ids: Tensor | None = None) -> None:
        """vocab_size: rows of the target's head. top_k: most children of a chain node.

        target_ids int64 [Vd]: what each row of the model's head means to the target; None: its own number.
        """
        self.model = model
        self.vocab_size = vocab_size
        if target_ids is None:  # heads may be padded apart
            rows = min(model.model.get_output_embeddings().out_features, vocab_size)
            target_ids = torch.arange(rows, device=model.device)
        self.target_ids = target_ids
        self.top_k = min(top_k, len(target_ids))
        self._rows: dict[int, _Row] = {}

    def models(self) -> tuple[nn.Module, ...]:
        return (self.model.model,)

    def reserve(self, num_rows: int, num_slots: int) -> None:
        self._runner = TargetRunner(self.model, num_rows, num_slots, ())

    def start(self, row: int, prompt: list[int], token: int, taps: Tensor | None) -> None:
        self._runner.prefill(row, prompt)
        self._rows[row] = _Row(len(prompt), [token])

    def commit(self, row: int, tokens: list[int], taps: Tensor | None) -> None:
        self._rows[row].pending += tokens

    def audit(self, row: int, ids: list[int], taps: Tensor | None) -> Iterator[Held]:
        state = self._rows[row]
        yield "tokens not yet run", state.pending, ids[state.length :]
        done = ids[: state.length]
        yield from cache_state(self._runner, row, done, recompute(self._runner, done))

    def release(self, row: int) -> None:
        self._runner.cache.release(row)
        del self._rows[row]

    @torch.inference_mode()
    def propose(self, budgets: dict[int, Budget]) -> dict[int, DraftTree]:
        """Trees for the rows; rows without room for a draft get their root alone."""
        drafts = {row: _Draft(self._rows[row].pending[-1], budget) for row, budget in budgets.items()}
        level, active = 1, {}

        def best() -> list[float]:
            return [math.exp(draft.scores[draft.tip]) for draft in active.values()]

        while active := {row: draft for row, draft in drafts.items() if self._width(draft.budget, level)}:
            if level > 1 and not goes_deeper(self.name, {row: d.budget for row, d in active.items()}, level - 1, best):
                break
            self._branch(list(active.values()), self._run({row: draft.chain for row, draft in active.items()}), level)
            level += 1
        return {row: draft.tree(self.name, self.vocab_size) for row, draft in drafts.items()}

    def _width(self, budget: Budget, level: int) -> int:
        """Children at a level, known before any is chosen: one each to the full depth, what is left from the top."""
        depth = budget.reach
        if level > depth:
            return 0
        spare = budget.nodes - 1 - depth - (level - 1) * (self.top_k - 1)
        return 1 + max(0, min(self.top_k - 1, spare))

    def _run(self, drafted: dict[int, list[int]]) -> Tensor:
        """Logits [R, V] of the model after each row's pending and drafted tokens.

        Keys of committed tokens before the root stay; the root and the drafts behind it are run again each time, a
        few tokens in a forward that reads all weights anyway, so that nothing drafted is ever in the cache.
        """
        first, last = min(drafted), max(drafted) + 1
        window = range(first, last)
        chains = {row: [*self._rows[row].pending, *tokens] for row, tokens in drafted.items()}
        trees = [DraftTree.chain(chains[row][0], chains[row][1:]) if row in chains else None for row in window]
        starts = [self._rows[row].length if row in chains else 0 for row in window]
        hidden, _, slots = self._runner.run(first, trees, starts)
        for row in chains:
            state, taken = self._rows[row], slots[row - first]
            done = len(state.pending) - 1
            self._runner.cache.commit(row, taken, taken[:done])
            state.length += done
            state.pending = state.pending[done:]
        ends = [(row - first, len(chain) - 1) for row, chain in chains.items()]
        return self._runner.logits(hidden[[row for row, _ in ends], [end for _, end in ends]])

    def _branch(self, drafts: list[_Draft], logits: Tensor, level: int) -> None:
        """Adds a level to each draft from the logits [R, V] after its chain."""
        budgets = [draft.budget for draft in drafts]
        ids = self.target_ids
        logq = draft_log_probs(logits[:, None, : len(ids)], budgets)
        ranks = rank(logq, budgets, level, ids)[:, 0]
        logq = logq[:, 0]
        widths = [self._width(budget, level) for budget in budgets]
        best = ranks.topk(max(widths), -1).indices
        chosen = ids[best].tolist()
        drawn = torch.tensor([budget.drawn for budget in budgets], device=logits.device)[:, None]
        logs = torch.where(drawn, logq, ranks).gather(1, best).tolist()
        for index, (draft, width, tokens) in enumerate(zip(drafts, widths, chosen)):
            if draft.budget.drawn:
                law = torch.zeros(self.vocab_size, dtype=torch.float64)
                law[ids.cpu()] = logq[index].double().exp().cpu()
                draft.drawn_from[draft.tip] = law
            draft.branch(tokens[:width], logs[index][:width])


def distilled(drafter: SmallDrafter, target: Target, top_k: int) -> SmallProposer:
    """A proposer from a trained small model, bound and on the target's device; it drafts the draft vocabulary."""
    folder = target.folder  # of its tokenizer
    model = Target(drafter.language_model(), target.tokenizer, target.config, folder, target.eos_ids)
    ids = drafter.draft_to_target(torch.arange(drafter.shape.draft_vocab_size, device=target.device))
    return SmallProposer(model, target.vocab_size, top_k, ids)


def check_tokenizer(model: Target, target: Target) -> None:
    """Raises ContractError, naming the first id that differs, unless both map the same ids to the same tokens."""
    if hash_tokenizer(model.tokenizer) == hash_tokenizer(target.tokenizer):
        return
    mine, theirs = ({index: token for token, index in t.tokenizer.get_vocab().items()} for t in (model, target))
    index = next(i for i in sorted(mine.keys() | theirs.keys()) if mine.get(i) != theirs.get(i))
    raise ContractError(
        f"drafter.path small:{model.folder}: id {index} is {mine.get(index)!r} in its tokenizer and "
        f"{theirs.get(index)!r} in that of target {target.name!r}; a small drafter needs the target's own map. "
        "Set drafter.path to small: with a smaller model of the target's family."
    )


def load_small(folder: Path, target: Target, top_k: int) -> SmallProposer:
    """A proposer from a model folder, on the target's device and in its dtype; raises TargetError, ContractError.

    Warns when one of its steps costs more than SLOW of one of the target's.
    """
    dtype = str(target.dtype).removeprefix("torch.")
    model = Target.load(TargetConfig(name=folder.name, path=str(folder), dtype=dtype, device=str(target.device)))
    check_tokenizer(model, target)
    own, theirs = step_seconds(model), step_seconds(target)
    if own > SLOW * theirs:
        log.warning(
            "drafter small:%s: one step takes %.1f ms, %.0f%% of the target's %.1f ms; over %.0f%% it rarely pays",
            *(folder, own * 1e3, 100 * own / theirs, theirs * 1e3, 100 * SLOW),
        )
    return SmallProposer(model, target.vocab_size, top_k)


def step_seconds(target: Target) -> float:
    """Median seconds of one decode step of a model, logits included."""
    runner = TargetRunner(target, 1, TIMED + 1, ())
    seconds = []
    for position in range(TIMED + 1):
        start = perf_counter()
        hidden, _, slots = runner.run(0, [DraftTree.root(0)], [position])
        runner.logits(hidden).argmax().item()  # waits for the device
        seconds.append(perf_counter() - start)
        runner.cache.commit(0, slots[0], slots[0])
    return sorted(seconds[1:])[TIMED // 2]
