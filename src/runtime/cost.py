"""How much to draft: the tree that promises most tokens per second, no draft at all among the choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from runtime.calibration import Calibration
from runtime.cost_table import SECOND_WIDTH, CostTable
from runtime.deepening import Deepening
from runtime.proposers.base import Budget
from runtime.tree import DraftTree

AUTO_NODES = 64  # most nodes of a tree under runtime.num_draft_tokens=auto, the root included
SHARE = 0.01  # of all time: most that exploring may lose, and most that believed drafts may lose beyond CREDIT
PAYS = 1.02  # times plain decoding's speed a draft must promise to be believed: the best of many estimates flatters
CREDIT = 4.0  # plain rounds that believed drafts may lose before their estimates have settled
REFRESH = 32  # drafted rounds after which the whole budget is drafted once, to see what deeper drafts are worth
PLAIN_FIRST, PLAIN_AGAIN = 4, 128  # drafted rounds after which one is plain, to know what that costs; doubling
AVERAGE = 0.1  # weight of the newest tree in what a depth is worth
CHARGED = 4.0  # a draft is charged at most this many times its estimate: a busy moment is not the drafter's
ANY_DEPTH = 0  # in place of a depth: that of a drafter that asks before each level


@dataclass
class _Worth:
    """What drafting to one depth gave lately: tokens per row, forward in plain steps, width of the best tree, levels
    drafted."""

    tokens: float
    steps: float
    width: float
    levels: float

    def follow(self, newest: _Worth) -> None:
        for name, value in vars(newest).items():
            setattr(self, name, getattr(self, name) + AVERAGE * (value - getattr(self, name)))


@dataclass
class _Profile:
    """_Worth by depth for one kind of batch, at ANY_DEPTH of a drafter that asks; drafts since the whole budget was
    drafted, and since a plain round."""

    worth: dict[int, _Worth] = field(default_factory=dict)
    best: int = 0  # depth last believed to pay most
    since_full: int = 0
    since_plain: int = 0
    plain_after: int = PLAIN_FIRST


@dataclass(frozen=True)
class _Round:
    """The round being run: what plan() decided and trim() made of it."""

    profile: _Profile
    depth: int  # drafted to; of a drafter that asks, the deepest it may go
    asking: bool  # the drafter asks before each level
    exploring: bool  # it is not believed to pay
    sampled: dict[int, bool]
    rate: float  # tokens per second that the next level should beat
    # Levels gone deeper from, by who asked: each row's best path probability there.
    sure: dict[tuple[str, int], dict[int, float]] = field(default_factory=dict)

    @property
    def levels(self) -> int:
        """Those that were drafted."""
        if not self.asking or not self.depth:
            return self.depth
        return 1 + max((level for _, level in self.sure), default=0)


class CostModel:
    """Chooses depth and size of the drafts of each round from measured costs and calibrated acceptance.

    A round: plan(), the proposer, trim(), the target, observe(). The aim is emitted tokens per second over the batch,
    (rows + sum of path probabilities) / (draft + forward) (TurboSpec, arXiv 2406.14066; Sequoia, arXiv 2402.12374),
    and a plain round is always a candidate. A drafter that works level by level asks before each further one, which
    must promise more tokens per second than rounds give otherwise; others draft to the depth that paid best on
    average. Two accounts keep plain decoding's speed whatever a drafter claims: drafts tried against the odds lose at
    most SHARE of all time, believed ones that turn out to lose at most CREDIT plain rounds and SHARE of all time; past
    that rounds are plain.
    """

    def __init__(self, table: CostTable, calibration: Calibration, depth: int, asking: bool = False):
        """depth: deepest draft ever asked for. asking: the drafter heeds Budget.deeper where it is given."""
        self.table = table
        self.calibration = calibration
        self.depth = depth
        self.asking = asking
        self.deepening = Deepening()
        self.expected: dict[int, float] = {}  # tokens each row should emit this round, set by trim()
        self.seconds = 0.0
        self.lost = 0.0  # seconds believed drafts lost against plain rounds, gains paid back first
        self.explored = 0.0  # the same of drafts tried against the odds
        self._profiles: dict[tuple[bool, bool, int], _Profile] = {}
        self._round: _Round | None = None

    # ---- before the draft

    def plan(self, budgets: Mapping[int, Budget]) -> dict[int, Budget]:
        """Budgets cut to what is worth drafting, depth 0 meaning nothing; at most what was asked for."""
        rows = len(budgets)
        sampled = {row: budget.noise is not None or budget.drawn for row, budget in budgets.items()}
        # Of a drawn tree nothing may depend on the draws, so its depth is settled before them.
        asking = self.asking and not any(budget.drawn for budget in budgets.values())
        profile = self._profiles.setdefault((any(sampled.values()), asking, self.table.batch(rows)), _Profile())
        deepest = max((budget.depth for budget in budgets.values() if budget.nodes > 1), default=0)
        rates = self._rates(profile, rows, min(deepest, self.depth), asking)
        depth, exploring = self._depth(profile, rows, min(deepest, self.depth), rates, asking)
        rate = max([rows / self.table.verify(1, rows), *rates.values()])
        self._round = _Round(profile, depth, asking, exploring, sampled, rate)
        return {row: self._cut(budget, profile, depth) for row, budget in budgets.items()}

    def _rates(self, profile: _Profile, rows: int, deepest: int, asking: bool) -> dict[int, float]:
        """Tokens per second of drafting to each depth, of all depths in one where the drafter asks; empty: unknown."""
        depths = ([ANY_DEPTH] if asking else range(1, deepest + 1)) if deepest else []
        if any(depth not in profile.worth for depth in depths):
            return {}
        plain, found = self.table.verify(1, rows), {}
        for depth in depths:
            worth = profile.worth[depth]
            draft = self.table.draft_between(min(worth.levels, deepest), rows)
            found[depth] = rows * worth.tokens / (draft + worth.steps * plain)
        return found

    def _depth(
        self, profile: _Profile, rows: int, deepest: int, rates: Mapping[int, float], asking: bool
    ) -> tuple[int, bool]:
        """The depth to draft to, and whether that is against the odds."""
        if not deepest:
            return 0, False
        if not rates:  # nothing is known yet: a drafter is believed first, on credit
            return (deepest, False) if self._affordable(1 if asking else deepest, rows, False) else (0, False)
        best = max(rates, key=rates.get)
        exploring = rates[best] <= PAYS * rows / self.table.verify(1, rows)
        if not exploring and profile.since_plain >= profile.plain_after:
            profile.plain_after = min(2 * profile.plain_after, PLAIN_AGAIN)
            return 0, False
        profile.best = best
        if asking or exploring or profile.since_full >= REFRESH:
            best = deepest
        return (best, exploring) if self._affordable(1 if asking else best, rows, exploring) else (0, False)

    def _affordable(self, depth: int, rows: int, exploring: bool) -> bool:
        """Whether a round that accepts nothing would stay within its account; drafts that cost next to nothing do."""
        if self.table.draft(depth, rows) <= SHARE * self.table.verify(1, rows):
            return True
        return self._risk(depth, depth + 1, rows) <= self._allowance(rows, exploring)  # room for one path

    def _risk(self, depth: int, nodes: int, rows: int) -> float:
        return self.table.draft(depth, rows) + self.table.verify(nodes, rows) - self.table.verify(1, rows)

    def _allowance(self, rows: int, exploring: bool) -> float:
        if exploring:
            return SHARE * self.seconds - self.explored
        return CREDIT * self.table.verify(1, rows) + SHARE * self.seconds - self.lost

    def _cut(self, budget: Budget, profile: _Profile, depth: int) -> Budget:
        depth = min(budget.depth, depth)
        if not depth:
            return replace(budget, nodes=1, depth=0)
        if self._round.asking:
            return replace(budget, depth=depth, deeper=self._deeper)
        known = profile.worth.get(depth)
        if not budget.drawn or known is None or profile.since_full >= REFRESH:
            return replace(budget, depth=depth)
        # A drawn tree must be verified whole, so its size is settled before it is drawn.
        width = self.table.width(min(max(2, round(known.width)), budget.nodes))
        return replace(budget, nodes=min(budget.nodes, width), depth=depth)

    # ---- during the draft

    def _deeper(self, source: str, level: int, chances: Mapping[int, float]) -> bool:
        """Budget.deeper of a round: whether the level below `level` promises more than the same time elsewhere."""
        current, table, rows = self._round, self.table, len(self._round.sampled)
        wide = min(SECOND_WIDTH, int(table.widths[-1]))
        node = (table.verify(wide, rows) - table.verify(1, rows)) / max(1, wide - 1)
        seconds = table.draft(level + 1, rows) - table.draft(level, rows) + node
        gain = sum(chance * self.deepening.worth(level, current.sampled[row]) for row, chance in chances.items())
        if gain <= current.rate * seconds or not self._affordable(level + 1, rows, current.exploring):
            return False
        current.sure[source, level] = dict(chances)
        return True

    # ---- after the draft

    def trim(self, trees: Mapping[int, DraftTree]) -> dict[int, DraftTree]:
        """The best nodes of each tree, as many per row as pay best for the whole batch; sets `expected`.

        A tree that was drawn (draft_probs) stays as it is: leaving out draws by their probability would change the
        distribution of the text.
        """
        if not self._round.depth:
            self.expected = dict.fromkeys(trees, 1.0)
            return dict(trees)
        paths = {
            row: self.calibration.path_probabilities(tree, self._round.sampled[row]) for row, tree in trees.items()
        }
        self._learn(trees, paths)
        width = self._width(trees, paths)
        kept, self.expected = {}, {}
        for row, tree in trees.items():
            whole = len(tree) <= width  # a drawn one always is
            nodes = range(len(tree)) if whole else sorted(np.argsort(-np.array(paths[row]), kind="stable")[:width])
            kept[row] = tree if whole else tree.part([int(node) for node in nodes])
            self.expected[row] = sum(paths[row][node] for node in nodes)
        return kept

    def _width(self, trees: Mapping[int, DraftTree], paths: Mapping[int, list[float]]) -> int:
        """Nodes per row, the root included: of the widths that are run the one with most tokens per second."""
        rows, current = len(trees), self._round
        fixed = [row for row, tree in trees.items() if tree.draft_probs is not None]
        drawn = sum(sum(paths[row]) for row in fixed)
        least = self.table.width(max((len(trees[row]) for row in fixed), default=1))
        forwards = self.table.forwards(max(map(len, trees.values())), rows)
        widths = self.table.widths[: len(forwards)]
        gains = _gains(_padded([paths[row] for row in trees if row not in fixed])[None], widths)[0] + drawn
        draft = self.table.draft(current.levels, rows)
        rates = gains / (draft + forwards)
        risk = draft + forwards - forwards[0]

        enough = widths >= least

        def best(allowed: np.ndarray, exploring: bool) -> int:
            within = allowed & (risk <= self._allowance(rows, exploring))
            return int(np.argmax(np.where(within, rates, 0.0) if within.any() else enough))

        chosen = best(enough, False)
        believed = widths[chosen] > 1 and rates[chosen] > PAYS * rows / forwards[0]
        if current.exploring and not believed:
            # It is tried all the same, for nothing is learned from a draft that is not verified.
            chosen = best(enough & (widths > 1), True)
        self._round = replace(current, exploring=current.exploring and not believed)
        return int(widths[chosen])

    def _learn(self, trees: Mapping[int, DraftTree], paths: Mapping[int, list[float]]) -> None:
        """What drafts like this one are worth, and each shallower depth, had it been drafted alone."""
        rows, current = len(trees), self._round
        cases = {ANY_DEPTH: current.levels} if current.asking else {d: d for d in range(1, current.depth + 1)}
        full, depths = _padded([paths[row] for row in trees]), _padded([trees[row].depths for row in trees])
        forwards = self.table.forwards(full.shape[1], rows)
        widths = self.table.widths[: len(forwards)]
        limits = np.array(list(cases.values()))
        # Another proposer's drafts may lie deeper than the levels of the one that asks.
        shallow = full[None] if current.asking else np.where(depths <= limits[:, None, None], full, 0.0)
        gains = _gains(shallow, widths)
        drafts = self.table.drafts(current.depth, rows)[limits - 1]
        best = np.argmax(gains / (drafts[:, None] + forwards), axis=1)  # smallest of equals
        for case, (depth, at) in enumerate(zip(cases, best.tolist())):
            steps, width = float(forwards[at] / forwards[0]), float(widths[at])
            found = _Worth(float(gains[case, at]) / rows, steps, width, float(limits[case]))
            current.profile.worth.setdefault(depth, found).follow(found)

    # ---- after the target

    def observe(
        self, trees: Mapping[int, DraftTree], paths: Mapping[int, tuple[int, ...]], draft: float, rest: float
    ) -> None:
        """Counts a finished round: trees as verified, accepted paths (root first), seconds of draft and of the rest.

        draft: from before plan() to after trim(). rest: everything else of the round, the device waited for.
        """
        rows, current = len(trees), self._round
        estimate = self.table.draft(current.levels, rows)
        self.seconds += draft + rest
        widest = max(map(len, trees.values()))
        self.table.observe_verify(widest, rows, rest)
        for row, tree in trees.items():
            self.calibration.update(tree, paths[row], current.sampled[row])
        current.profile.since_plain = 0 if widest == 1 else current.profile.since_plain + 1
        self._observe_levels(trees, paths)
        if not current.depth:
            return
        self.table.observe_draft(current.levels, rows, draft)
        emitted = sum(map(len, paths.values())) / rows
        loss = min(draft, CHARGED * estimate) + self.table.verify(widest, rows) - emitted * self.table.verify(1, rows)
        if current.exploring and loss > 0:
            self.explored += loss
        else:
            self.lost = max(0.0, self.lost + loss)

    def _observe_levels(self, trees: Mapping[int, DraftTree], paths: Mapping[int, tuple[int, ...]]) -> None:
        """Counts what the levels of a finished round gave."""
        current, profile = self._round, self._round.profile
        if current.asking:
            self.deepening.round()
            for (source, level), chances in current.sure.items():
                for row, chance in chances.items():
                    path = paths[row]
                    right = len(path) > level + 1 and trees[row].sources[path[level + 1]] == source
                    self.deepening.update(level, current.sampled[row], chance, right)
        elif current.depth:
            full = max(profile.worth) == current.depth
            # A draft accepted deeper than is believed to pay calls for another look at once.
            deeper = any(trees[row].depths[path[-1]] > profile.best for row, path in paths.items())
            profile.since_full = (REFRESH if deeper else 0) if full else profile.since_full + 1


def _padded(rows: list) -> np.ndarray:
    """Rows of numbers as one array [rows, longest], zeros behind the short ones."""
    found = np.zeros((len(rows), max(map(len, rows), default=1)))
    for index, row in enumerate(rows):
        found[index, : len(row)] = row
    return found


def _gains(paths: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Expected tokens of all rows when each keeps its best nodes, by width; the root stands for the bonus token.

    paths: [cases, rows, nodes] path probabilities, the root's first; returns [cases, widths].
    """
    by_count = np.cumsum(-np.sort(-paths, axis=2).sum(1), axis=1)
    return by_count[:, np.minimum(widths, paths.shape[2]) - 1]
