"""The acceptance rules a request may ask for: coupled (the default), rejection, and typical, which is lossy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from runtime.processors import Processors
from runtime.sampling import Noise, SamplingParams, choose, keyed, require_choice
from runtime.tree import DraftTree
from runtime.verify import Verification, verify, walk

EPSILON, DELTA = 0.09, 0.3  # Medusa's own (medusa_generate)

Law = Callable[[int], Tensor]  # the target's distribution after a node, fp64 [V] on the CPU


class Chance:
    """The coins and draws of one round: a function of (seed, root position) and of how many were asked before.

    A stream of its own: neither the target's Gumbel noise nor the noise drafts are drawn with.
    """

    def __init__(self, seed: int, position: int):
        self.seed, self.position = seed, position
        self._asked = 0

    def accept(self, probability: float) -> bool:
        """True with this probability: never at 0, always at 1."""
        return self._uniform() < probability

    def draw(self, weights: Tensor) -> int:
        """An index with probability in proportion to its weight, fp64 [V]; never one of weight 0."""
        sums = weights.cumsum(0)
        return int(torch.searchsorted(sums, self._uniform() * sums[-1], right=True))

    def _uniform(self) -> float:
        """The next number of [0, 1), 53 bits."""
        self._asked += 1
        return (keyed("chance", self.seed, self.position, self._asked) & ((1 << 53) - 1)) * 2.0**-53


def decide(
    tree: DraftTree,
    logits: Tensor,
    params: SamplingParams,
    noise: Noise | None,
    root_position: int,
    processors: Processors | None = None,
    ids: Sequence[int] = (),
) -> Verification:
    """The accepted path and the token after it, by the rule the request asks for.

    logits: [N, V] at the nodes, not divided by the temperature; processed already, or raw with the request's
    processors and ids (prompt and emitted tokens, the root last). noise: the request's own (None: made from its seed).
    root_position: absolute position of the root. Coupled and, at temperature 0, rejection give the text of seeded
    plain decoding; rejection gives its distribution; typical neither, except at temperature 0. Raises ValueError on
    logits that are not finite or leave no token, and on drafts their draft_probs cannot have given.
    """
    target = _Target(tree, logits, params, root_position, processors, ids)
    if params.verification == "typical":
        return typical(tree, target.law, Chance(params.seed, root_position))
    if params.verification == "coupled" or params.temperature == 0.0:
        return target.coupled(noise)
    return reject(tree, target.law, Chance(params.seed, root_position))


class _Target:
    """The target at the nodes of one tree.

    On the CPU a node is processed when a rule asks for it, since a walk visits few and a sort over the vocabulary is
    dear; elsewhere all nodes at once, since each visit would wait for the device.
    """

    def __init__(
        self,
        tree: DraftTree,
        logits: Tensor,
        params: SamplingParams,
        root_position: int,
        processors: Processors | None,
        ids: Sequence[int],
    ):
        self.tree, self.params, self.lazy = tree, params, logits.device.type == "cpu"
        self.positions = [root_position + depth + 1 for depth in tree.depths]
        self.processors, self.ids, self.raw = processors, ids, logits

    def coupled(self, noise: Noise | None) -> Verification:
        """The walk along the target's own choices under the request's noise."""
        if self.lazy:
            return walk(
                self.tree,
                lambda node: int(choose(self._rows([node]), [self.positions[node]], self.params, noise)),
            )
        return verify(self.tree, choose(self._rows(range(len(self.tree))), self.positions, self.params, noise).tolist())

    def law(self, node: int) -> Tensor:
        """The distribution after a node, fp64 [V] on the CPU; all of it on the argmax at temperature 0."""
        if not self.lazy:
            self.raw, self.processors, self.lazy = self._rows(range(len(self.tree))).cpu(), None, True
        row = self._rows([node])
        require_choice(row, [self.positions[node]])
        if self.params.temperature == 0.0:
            return torch.nn.functional.one_hot(row[0].argmax(), row.shape[-1]).double()
        return torch.softmax(row[0].double() / self.params.temperature, -1)

    def _rows(self, nodes: Sequence[int]) -> Tensor:
        if self.processors is None:
            return self.raw[nodes[0] : nodes[-1] + 1]  # one node or all of them: a view
        return self.processors.apply(self.raw, self.tree, self.ids, nodes)


def reject(tree: DraftTree, law: Law, chance: Chance) -> Verification:
    """The p/q rules, exact in distribution for drafts that do not depend on this chance.

    Drawn chains: block verification. Drawn trees: recursive rejection without replacement. Drafts that were not drawn
    (draft_probs None): a token of the target's is drawn and matched, which is the p/q rule for a one-hot q.
    """
    if tree.draft_probs is None:
        return walk(tree, lambda node: chance.draw(law(node)))
    if tree.parents == tuple(range(-1, len(tree) - 1)):
        return block(tree, law, chance)
    return without_replacement(tree, law, chance)


def without_replacement(tree: DraftTree, law: Law, chance: Chance) -> Verification:
    """Recursive rejection sampling over children drawn without replacement, in the order they were drawn.

    A child c is accepted with probability min(1, p(c)/q(c)); after a miss p becomes (p - q)+ and q loses c, both
    normalised (Sequoia, arXiv 2402.12374; EAGLE).
    """
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node in range(1, len(tree)):
        children[tree.parents[node]].append(node)
    path = [0]
    while True:
        p, q = law(path[-1]), _draft_law(tree, path[-1])
        for child in children[path[-1]]:
            token = tree.tokens[child]
            if chance.accept(min(1.0, float(p[token]) / _drawn_with(q, token, child))):
                path.append(child)
                break
            p = _normalised((p - q).clamp_(min=0.0), p)
            q[token] = 0.0
            q = _normalised(q, q)
        else:
            return Verification(tuple(path), chance.draw(p))


def block(tree: DraftTree, law: Law, chance: Chance) -> Verification:
    """Block verification of a drawn chain: accepts at least as many drafts as the token rule (arXiv 2403.10444).

    With p_0 = 1, p_i = min(1, p_{i-1} P(x_i)/Q(x_i)) and R_i = sum (p_i P - Q)+ after x_i, the longest prefix i whose
    coin falls under h_i = R_i / (R_i + 1 - p_i) is kept (h = p at the end of the chain); the next token comes from
    (p_i P - Q)+.
    """
    last = len(tree) - 1
    kept, residuals = 1.0, []
    keep = [1.0]
    for node in range(last):
        p, q = law(node), _draft_law(tree, node)
        left = (kept * p - q).clamp_(min=0.0)
        mass = float(left.sum())
        if node:
            keep.append(mass / (mass + 1.0 - kept) if kept < 1.0 else 1.0)  # 1 - p_i = 0: certain, even when R_i = 0
        residuals.append(_normalised(left, p))
        token = tree.tokens[node + 1]
        kept = min(1.0, kept * float(p[token]) / _drawn_with(q, token, node + 1))
    if last:
        keep.append(kept)
    residuals.append(law(last))
    length = next(i for i in range(last, -1, -1) if i == 0 or chance.accept(keep[i]))
    return Verification(tuple(range(length + 1)), chance.draw(residuals[length]))


def typical(tree: DraftTree, law: Law, chance: Chance) -> Verification:
    """Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1): lossy, the text is not the target's.

    A child is accepted when p(c) > min(EPSILON, DELTA * exp(-H(p))); the longest accepted path wins, between equals
    the likelier. The next token is drawn from p.
    """
    laws: dict[int, Tensor] = {}
    reached = {0: 0.0}  # accepted nodes and the log probability of the path to them
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        if parent not in reached:
            continue
        if parent not in laws:
            laws[parent] = law(parent)
        p = laws[parent]
        entropy = -(p * (p + 1e-5).log()).sum()
        chosen = p[tree.tokens[node]]
        if chosen > (DELTA * torch.exp(-entropy)).clamp(max=EPSILON):
            reached[node] = reached[parent] + float(chosen.log())
    best = max(reached, key=lambda node: (tree.depths[node], reached[node]))
    return Verification(tuple(tree.path(best)), chance.draw(laws[best] if best in laws else law(best)))


def _draft_law(tree: DraftTree, node: int) -> Tensor:
    """A copy of what the node's children were drawn from, fp64 [V] on the CPU."""
    q = tree.draft_probs[node].cpu().double()
    return q / q.sum()


def _drawn_with(q: Tensor, token: int, node: int) -> float:
    """q(token); raises ValueError when the token cannot have been drawn."""
    probability = float(q[token])
    if not probability > 0.0:
        raise ValueError(
            f"node {node} has token {token}, which its draft_probs give probability {probability}; a drawn tree must "
            "carry the distribution its drafts were drawn from"
        )
    return probability


def _normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """weights over their sum; `otherwise` where rounding left nothing of them."""
    total = weights.sum()
    return weights / total if total > 0.0 else otherwise
