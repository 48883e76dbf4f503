"""What the engine asks of every proposer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from runtime.sampling import DraftNoise
from runtime.tree import DraftTree

Held = tuple[str, object, object]  # debug mode: a field's name, what is kept, what the text gives


@dataclass(frozen=True)
class Budget:
    """Limits of one row's tree: nodes (root included), depth of the deepest node, and how the row samples.

    noise: None at temperature 0; else the noise with which the target will choose the token at each depth, for
    proposers that can draft with it (coupled drafting). drawn: the row is verified by rejection: a proposer that
    has distributions draws a tree of a fixed shape from them with this noise, which then is not the target's.
    deeper: for proposers that draft level by level, asked before each further one as deeper(their name, the level
    that is there, the best path probability in it of each row that may go on); None: always to `depth`.
    """

    nodes: int
    depth: int
    noise: DraftNoise | None = None
    drawn: bool = False
    deeper: Callable[[str, int, dict[int, float]], bool] | None = None

    @property
    def reach(self) -> int:
        """Depth of the deepest node there is room for: a path takes a node a level, the root one more."""
        return min(self.depth, self.nodes - 1)


class Proposer(ABC):
    """Drafts trees for rows; it may change the speed of a request, never its text.

    State is per row, made by start() and rebuilt from committed tokens alone.
    """

    name: str
    taps: tuple[int, ...] = ()  # HF hidden_states indices it needs of the target
    wants_logits: bool = False  # observe() is called
    asks: bool = False  # it heeds Budget.deeper
    weights: int = 0  # of models of its own, those borrowed from the target not among them
    trained_depth: int | None = None  # drafts deeper than this were never trained: a merged tree leaves them to others

    def models(self) -> tuple[nn.Module, ...]:
        """The models it runs, for what they cost in memory; none where it looks drafts up."""
        return ()

    def reserve(self, num_rows: int, num_slots: int) -> None:  # noqa: B027 (most proposers keep no cache)
        """Caches must hold num_rows rows of num_slots tokens from now on; called while no row runs."""

    @abstractmethod
    def start(self, row: int, prompt: list[int], token: int, taps: Tensor | None) -> None:
        """A row begins: its prompt, the first token after it, the prompt's taps [T, K*Ht]."""

    @abstractmethod
    def propose(self, budgets: dict[int, Budget]) -> dict[int, DraftTree]:
        """One tree per row, rooted at the row's last committed token."""

    @abstractmethod
    def commit(self, row: int, tokens: list[int], taps: Tensor | None) -> None:
        """Tokens were emitted, the last is the next root or ended the request; taps [len(tokens), K*Ht] of the nodes
        before them."""

    def observe(self, row: int, tree: DraftTree, logits: Tensor) -> None:  # noqa: B027 (most proposers do not look)
        """The target's raw logits [N, V] at the nodes of the tree just verified; before commit()."""

    def audit(self, row: int, ids: list[int], taps: Tensor | None) -> Iterable[Held]:
        """For debug mode: what is kept for a row beside the same computed from its text alone.

        ids: the text, the next root last; taps [len(ids) - 1, K*Ht]: the target's, from one forward over ids[:-1].
        """
        return ()

    @abstractmethod
    def release(self, row: int) -> None:
        """The row's request ended."""
