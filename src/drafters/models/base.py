"""What the pipeline asks of every drafter family; a family is one subclass of Drafter, one settings class, one YAML."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import Field, asdict, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from drafters.batches import Batch
from drafters.errors import ArtifactError, ConfigError, ContractError
from drafters.models.layout import Features, Layout, make_layout

if TYPE_CHECKING:
    from drafters.config_drafter import DrafterConfig
    from drafters.target import Target


ROPE_FIELDS = frozenset({"rope_theta", "rope_scaling"})  # of a shape; a contract has them under rope
# Rotary positions of drafters made elsewhere that this code runs: their parameters, needed and further.
SCALED_ROPES = {
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"},
    ),
}


def variant(default: Any) -> Any:
    """A shape's field that only drafters made elsewhere set; at its default contracts leave it out, as old ones do."""
    return field(default=default, metadata={"variant": True})


def _said(found: Field, value: Any) -> bool:
    return not (found.metadata.get("variant") and value == found.default)


class DrafterShape(Protocol):
    """A frozen dataclass of every size and graph flag: two equal shapes compute the same graph."""

    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int


def check_draft_vocab(shape: DrafterShape) -> None:
    """Raise ConfigError when the draft vocabulary is larger than the target's."""
    if shape.draft_vocab_size > shape.vocab_size:
        raise ConfigError(
            f"drafter.draft_vocab_size is {shape.draft_vocab_size}, the target's vocabulary only "
            f"{shape.vocab_size}. Set drafter.draft_vocab_size={shape.vocab_size} or less."
        )


def check_heads(shape: Any) -> None:
    """Raise ConfigError when the shape's num_heads is no multiple of its num_kv_heads."""
    if shape.num_heads % shape.num_kv_heads:
        raise ConfigError(
            f"drafter.num_heads is {shape.num_heads}, not a multiple of drafter.num_kv_heads {shape.num_kv_heads}. "
            "Set drafter.num_kv_heads to a divisor."
        )


def misfit(scaling: dict[str, Any]) -> str | None:
    """What is wrong with a rope_scaling of a kind in SCALED_ROPES, in words; None where it can be run."""
    needed, further = SCALED_ROPES[scaling["rope_type"]]
    wrong = sorted(needed - set(scaling) | set(scaling) - needed - further - {"rope_type"})
    return f"{wrong[0]} is {'missing' if wrong[0] in needed else 'unknown'}" if wrong else None


class Drafter(nn.Module, ABC):
    """A trainable drafter: its graph, its draft vocabulary, and what it borrows of the target."""

    family: ClassVar[str]
    shape_type: ClassVar[type]
    # Whether its training graph runs the target itself and is given Inputs where others are given Features.
    runs_target: ClassVar[bool] = False
    first_stage: ClassVar[str | None] = None  # a family whose drafters init_from may name too: a part of these
    further_means: ClassVar[tuple[str, ...]] = ()  # what its training graph tells beside the losses of its steps
    steps_field: ClassVar[str | None] = "ttt_steps"  # where a graph records the draft steps; None: the shape has them

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool))
        # A plain attribute: the target owns this tensor, so .to() must not copy it nor a save write it.
        self.embedding: Tensor | None = None
        self.measured: dict[str, Any] = {}  # what measure() found, as JSON values; an export keeps it

    # ---- from settings to a drafter

    @classmethod
    @abstractmethod
    def shape_for(cls, cfg: DrafterConfig, target: Target) -> DrafterShape:
        """The shape that the settings ask for; sizes left null are the target's."""

    @staticmethod
    @abstractmethod
    def usual_taps(num_layers: int) -> tuple[int, ...]:
        """The `hidden_states` indices it reads of a target of so many layers, in the order of its input."""

    @classmethod
    def taps_for(cls, cfg: DrafterConfig, target: Target) -> tuple[int, ...]:
        """The `hidden_states` indices that the settings ask for."""
        return cls.usual_taps(target.num_layers)

    @classmethod
    def graph(cls, shape: DrafterShape, steps: int) -> dict[str, Any]:
        """What a contract records of the graph; steps: the draft steps it was trained for."""
        values = asdict(shape)
        said = (each.name for each in fields(shape) if _said(each, values[each.name]))
        sizes = {name: values[name] for name in said if name not in ROPE_FIELDS}
        return sizes if cls.steps_field is None else sizes | {cls.steps_field: steps}

    @classmethod
    def shape_from(cls, graph: dict[str, Any], rope: dict[str, Any], where: str) -> DrafterShape:
        """The shape that a contract records; raises ContractError naming a field this code cannot run."""
        steps = {cls.steps_field} - {None}
        known = {each.name for each in fields(cls.shape_type)} - ROPE_FIELDS | steps
        wanted = known - {each.name for each in fields(cls.shape_type) if each.metadata.get("variant")}
        for key in sorted(wanted - set(graph) | set(graph) - known):
            problem = "is missing" if key in wanted else "is unknown to this code"
            raise ContractError(f"{where}: field graph.{key} {problem}. Use the Outrider version that wrote it.")
        sizes = {key: value for key, value in graph.items() if key not in steps}
        return cls.shape_type(**sizes, **cls._rope_from(rope, cls.rotates(graph), where))

    @classmethod
    def _rope_from(cls, rope: dict[str, Any], rotates: bool, where: str) -> dict[str, Any]:
        """The ROPE_FIELDS of a shape that a contract's rope records."""
        if not rotates and not rope:
            return {}
        kind, scalable = rope.get("rope_type"), "rope_scaling" in cls.shape_type.__dataclass_fields__
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        if rotates and "rope_theta" in rope:
            if scaling == {"rope_type": "default"}:
                return {"rope_theta": rope["rope_theta"]}
            if scalable and kind in SCALED_ROPES and misfit(scaling) is None:
                return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
        raise ContractError(
            f"{where}: rope is {rope}, this code runs "
            f"{'rope_type default with a rope_theta' if rotates else 'this family without one'}. "
            "Use the Outrider version that wrote it."
        )

    @classmethod
    def rotates(cls, graph: dict[str, Any]) -> bool:
        """Whether a graph, as a contract records it, has rotary positions."""
        return "rope_theta" in cls.shape_type.__dataclass_fields__

    @classmethod
    def rope(cls, shape: DrafterShape) -> dict[str, Any]:
        """What a contract records of rotary positions; empty where the graph has none."""
        theta = getattr(shape, "rope_theta", None)
        if theta is None:
            return {}
        scalable = "rope_scaling" in cls.shape_type.__dataclass_fields__
        return {"rope_type": "default", "rope_theta": theta} | ((scalable and shape.rope_scaling) or {})

    @classmethod
    def deepest(cls, graph: dict[str, Any]) -> int | None:
        """The deepest draft that training made sound, from a contract's graph; None: no limit."""
        return graph["ttt_steps"]

    # ---- what it borrows

    @property
    def borrowed(self) -> tuple[str, ...]:
        """Names in state_dict() that bind() fills with the target's own weights; never saved, never trained."""
        return ()

    def bind(self, target: Target) -> None:
        """Share what the drafter borrows of the target, after bind_vocab(); raises ContractError on another shape."""
        self.bind_embedding(target.embed_weight)

    def bind_embedding(self, weight: Tensor) -> None:
        """Share the target's frozen input embedding [V, Ht]; raises ContractError on another shape."""
        expected = (self.shape.vocab_size, self.embedding_size)
        if tuple(weight.shape) != expected:
            raise ContractError(
                f"the target's embedding has shape {tuple(weight.shape)}, the drafter needs {expected}. "
                f"Set drafter.hidden_size={weight.shape[1]} and train it for this target."
            )
        self.embedding = weight.detach()

    @property
    def embedding_size(self) -> int:
        """Width of the embeddings it reads."""
        return self.shape.target_hidden_size

    def bind_vocab(self, d2t: Tensor, t2d: Tensor) -> None:
        """Copy the draft vocabulary, d2t offsets [Vd] and t2d flags [V]; raises ContractError on a misfit."""
        expected = (self.shape.draft_vocab_size, self.shape.vocab_size)
        if (d2t.numel(), t2d.numel()) != expected:
            raise ContractError(
                f"the draft vocabulary has d2t, t2d of {d2t.numel()}, {t2d.numel()} entries, the drafter "
                f"needs {expected[0]}, {expected[1]}. Set drafter.draft_vocab_size={d2t.numel()}."
            )
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)

    def embed(self, ids: Tensor) -> Tensor:
        """Look ids [..] up in the target's embedding; returns [.., Ht] in the drafter's dtype."""
        if self.embedding is None:
            raise ContractError("the drafter has no embedding yet. Call bind(target).")
        return functional.embedding(ids, self.embedding).to(self.dtype)

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """What its layers compute in."""

    def draft_to_target(self, ids: Tensor) -> Tensor:
        """Map draft-vocabulary ids to target-vocabulary ids of the same shape."""
        return ids + self.d2t[ids]

    def own_state(self) -> dict[str, Tensor]:
        """state_dict() without what is borrowed: what a checkpoint or an export holds."""
        return {name: value for name, value in self.state_dict().items() if name not in self.borrowed}

    def exported_state(self) -> dict[str, Tensor]:
        """own_state() without an adapter of the target, which an export keeps as peft does."""
        return self.own_state()

    def tuned(self, target: Target) -> Target:
        """The target as the drafter drafts for it: itself, but for families that train an adapter of it."""
        return target

    def for_decoding(self) -> None:  # noqa: B027
        """Drop what only training reads; the drafter has its weights and is bound."""

    def clone(self) -> Self:
        """A copy that shares the borrowed embedding."""
        return copy.deepcopy(self, {id(self.embedding): self.embedding})

    # ---- training

    def initialise(self, cfg: DrafterConfig, target: Target, batch: Batch, taps: tuple[int, ...]) -> None:
        """Set a new, bound drafter's weights as the settings ask; `batch` is a sample for scales."""
        if cfg.warm_start:
            self.warm_start(target, batch, taps)

    def warm_start(self, target: Target, batch: Batch, taps: tuple[int, ...]) -> None:  # noqa: B027
        """Start from the target's weights, where the family can; `batch` is a sample for scales."""

    @abstractmethod
    def training_graph(self, cfg: DrafterConfig, target: Target) -> nn.Module:
        """The module DeepSpeed trains: forward(layout, features) -> loss sum and fp32 statistics [4, steps].

        The trainer keeps its attribute `progress` at the share of the run that is done, from 0 to below 1.
        The statistics' rows: loss sum, positions whose draft equals the target's choice, positions where every
        draft so far did, supervised positions. A choice outside the draft vocabulary counts as a miss. Each of
        further_means adds two rows, a sum and its count in column 0.
        """

    @classmethod
    def loss_counts(cls, layout: Layout) -> list[int]:
        """Positions of each step that the loss is a mean over, those of step k counted with weight decay**k."""
        return layout.counts()

    @classmethod
    def rate_group(cls, parameter: str) -> str:
        """The group whose learning rate a parameter of this name follows."""
        return ""

    @classmethod
    def rates(cls, cfg: DrafterConfig, progress: float) -> dict[str, float]:
        """What trainer.learning_rate is multiplied with for each group, when a share `progress` of the run is done."""
        return {"": 1.0}

    @classmethod
    def layout(cls, batch: Batch, steps: int) -> Layout:
        """Which positions of a batch take part in which of `steps` draft steps."""
        return make_layout(batch, steps)

    # ---- what is measured of it once it is trained

    def measure(self, batches: Iterable[tuple[Layout, Features]]) -> None:  # noqa: B027
        """Put into `measured` what the runtime wants to know of it beside its weights, from held-out batches."""

    def check_measured(self, where: str) -> None:
        """Raise ArtifactError when `measured`, read back from the file `where`, is not what measure() leaves."""
        if self.measured:
            raise ArtifactError(f"{where}: family {self.family} keeps nothing beside its weights. Export it again.")

    # ---- the probe

    @abstractmethod
    def first_logits(self, ids: Tensor, taps: Tensor, position_ids: Tensor) -> Tensor:
        """Teacher-forced logits [N, L-1, Vd] of the first draft at positions 0..L-2.

        ids [N, L]; taps [N, L-1, S*Ht] and position_ids [N, L-1] of positions 0..L-2. Row t drafts token t+2.
        """
