"""Medusa-2 (arXiv 2401.10774, 2.2.2): Medusa heads trained together with a LoRA of their target."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafters.adapter import Adapter, LoraShape, TunedTarget, decoder_layers, layer_sizes
from drafters.config_drafter import Medusa2Config
from drafters.errors import ContractError
from drafters.losses import make_teacher, self_distillation
from drafters.models.heads import HeadsTraining
from drafters.models.layout import Features, Inputs, Layout
from drafters.models.medusa import MedusaDrafter, MedusaShape
from drafters.target import Target

HEADS, ADAPTER = "heads", "adapter"  # groups of parameters with a learning rate each
# Share of heads_weight at a share of the joint training, so that a start can disturb the target less.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: progress,
    "sine": lambda progress: math.sin(math.pi / 2 * progress),
}


@dataclass(frozen=True)
class Medusa2Shape(MedusaShape):
    """Medusa's sizes and the LoRA's; lora_sizes: [out, in] of each linear layer tuned in every decoder layer."""

    lora_rank: int
    lora_alpha: int
    lora_dropout: float
    lora_layers: int
    lora_sizes: dict[str, list[int]]


class Medusa2Drafter(MedusaDrafter):
    """Medusa heads and the factors of a LoRA; the heads draft for the target that the LoRA tunes, and no other."""

    family = "medusa2"
    shape_type = Medusa2Shape
    runs_target = True
    first_stage = "medusa"  # the paper's first stage: the heads alone
    further_means = ("kl", "agreement")  # of the tuned target with the original, over response positions

    def __init__(self, shape: Medusa2Shape) -> None:
        super().__init__(shape)
        self.lora = nn.ParameterDict()
        for layer in range(shape.lora_layers):
            for name, (size_out, size_in) in shape.lora_sizes.items():
                # As peft starts them: B = 0, so that the first step begins at the target as it is.
                a = nn.Parameter(torch.empty(shape.lora_rank, size_in))
                nn.init.kaiming_uniform_(a, a=math.sqrt(5))
                self.lora[_key(layer, name, "lora_A")] = a
                self.lora[_key(layer, name, "lora_B")] = nn.Parameter(torch.zeros(size_out, shape.lora_rank))

    @classmethod
    def shape_for(cls, cfg: Medusa2Config, target: Target) -> Medusa2Shape:
        layers, sizes = layer_sizes(target.model, cfg.lora_targets)
        heads = super().shape_for(cfg, target)
        return Medusa2Shape(
            **vars(heads),
            lora_rank=cfg.lora_rank,
            lora_alpha=cfg.lora_alpha,
            lora_dropout=cfg.lora_dropout,
            lora_layers=layers,
            lora_sizes=sizes,
        )

    @classmethod
    def shape_from(cls, graph: dict[str, Any], rope: dict[str, Any], where: str) -> Medusa2Shape:
        shape = super().shape_from(graph, rope, where)
        for name, size in shape.lora_sizes.items():
            if not (isinstance(size, list) and len(size) == 2 and all(type(each) is int for each in size)):
                raise ContractError(
                    f"{where}: field graph.lora_sizes.{name} is {size!r}, expected [out, in]. "
                    "Copy the folder again, or export it again."
                )
        return shape

    @property
    def lora_shape(self) -> LoraShape:
        """The LoRA as peft is told of it."""
        shape = self.shape
        names = {name.rpartition(".")[2] for name in shape.lora_sizes}
        return LoraShape(shape.lora_rank, shape.lora_alpha, shape.lora_dropout, tuple(sorted(names)))

    def factors(self, model: PreTrainedModel) -> dict[str, nn.Parameter]:
        """The LoRA's own parameters by the names that peft gives them in a model."""
        where = decoder_layers(model)[0]
        return {
            f"base_model.model.{where}.{layer}.{name}.{kind}.weight": self.lora[_key(layer, name, kind)]
            for layer in range(self.shape.lora_layers)
            for name in self.shape.lora_sizes
            for kind in ("lora_A", "lora_B")
        }

    def adapter(self, target: Target) -> Adapter:
        """The LoRA as it stands now, copied."""
        factors = self.factors(target.model).items()
        return Adapter(self.lora_shape, {name: value.detach().float().cpu().clone() for name, value in factors})

    def tuned(self, target: Target) -> Target:
        return target.with_adapter(self.adapter(target))

    def exported_state(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.own_state().items() if self.rate_group(name) != ADAPTER}

    def bind(self, target: Target) -> None:
        """Share what is borrowed; of a target that is tuned already, take the factors too, in fp32."""
        super().bind(target)
        if target.adapter is None:
            return
        found = target.adapter.tensors
        for name, parameter in self.factors(target.model).items():
            if name not in found or found[name].shape != parameter.shape:
                raise ContractError(
                    f"the target is tuned by an adapter without {name} of {list(parameter.shape)}: it belongs to "
                    "another drafter. Give the folder of one export."
                )
            parameter.data = found[name].to(parameter.device, copy=True)

    def for_decoding(self) -> None:
        # The target's weights hold them.
        self.lora = nn.ParameterDict()

    # ---- training

    @classmethod
    def rate_group(cls, parameter: str) -> str:
        return ADAPTER if "lora." in parameter else HEADS

    @classmethod
    def rates(cls, cfg: Medusa2Config, progress: float) -> dict[str, float]:
        # 0 leaves the factors as they are to the bit, whatever the weight decay.
        return {HEADS: cfg.heads_lr_multiplier, ADAPTER: 0.0 if progress < cfg.heads_warmup else 1.0}

    @classmethod
    def loss_counts(cls, layout: Layout) -> list[int]:
        """Every part of the loss is a mean over response positions."""
        return [len(layout.teacher), *(0 for _ in layout.steps[1:])]

    def training_graph(self, cfg: Medusa2Config, target: Target) -> Medusa2Training:
        return Medusa2Training(self, cfg, target)


class Medusa2Training(HeadsTraining):
    """kl_weight * KL(target || tuned target) + s * heads_weight * sum_k head_decay**k * loss of head k.

    The heads' teacher is the tuned target, cut off from the gradient. The paper takes the response's own tokens: the
    original target wrote them, so they are what it says there, and KL holds the tuned one to that; but the tuned one
    is what drafts are verified by, and its whole distribution says more than one token. While only the heads train,
    the target runs without a gradient and has no loss.
    """

    drafter: Medusa2Drafter

    def __init__(self, drafter: Medusa2Drafter, cfg: Medusa2Config, target: Target) -> None:
        super().__init__(drafter, cfg.head_decay, cfg.loss)
        self.progress = 0.0
        self.kl_weight, self.heads_weight = cfg.kl_weight, cfg.heads_weight
        self.schedule, self.warmup = SCHEDULES[cfg.heads_schedule], cfg.heads_warmup
        # Plain attributes: neither DeepSpeed nor a checkpoint is to see anything of the target.
        self.target = target
        self.tuned = TunedTarget(target.model, drafter.lora_shape, drafter.factors(target.model))
        t2d = drafter.t2d.to(target.device)
        self.draft_head = target.head_weight.detach()[t2d].to(drafter.dtype)
        self.to_draft = torch.where(t2d, t2d.cumsum(0) - 1, -1)

    @property
    def heads_share(self) -> float:
        """s: of heads_weight; 1 while only the heads train."""
        joint = (self.progress - self.warmup) / (1 - self.warmup)
        return 1.0 if joint < 0 else self.schedule(joint)

    def forward(self, layout: Layout, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return the loss sum and the statistics that Drafter.training_graph describes."""
        together = self.training and self.progress >= self.warmup
        self.tuned.train(together)
        device = inputs.ids.device
        told = layout.teacher.to(device)
        with torch.set_grad_enabled(together):
            last = self.tuned.last_hidden(inputs.ids, inputs.position_ids, inputs.mask).flatten(0, 1)
        kl, choice, further = self._compared(inputs, last[told], told)
        teacher = make_teacher(last[told].detach(), self.draft_head, choice, self.to_draft)
        heads, stats = super().forward(layout, Features(last[layout.active.to(device)], teacher))
        rows = torch.zeros(len(further), stats.shape[1], device=device)
        rows[:, 0] = torch.stack(further)
        return self.kl_weight * kl + self.heads_share * self.heads_weight * heads, torch.cat((stats, rows))

    def _compared(self, inputs: Inputs, last: Tensor, told: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """KL sum of the tuned target's last hidden states [R, Ht] with the original's, the tuned one's choice [R],
        and the rows of further_means: zeros while only the heads train, which need no comparison."""
        zero = torch.zeros((), device=last.device)
        if self.training and self.progress < self.warmup:
            from drafters.features import target_choice  # features.py builds on this package

            return zero, target_choice(self.target, last), [zero] * 4
        original = self.tuned.original(inputs.ids, inputs.position_ids, inputs.mask).flatten(0, 1)[told]
        kl, choice, agreed = self_distillation(last, original, self.target.head_weight)
        return kl, choice, [kl.detach().float(), zero + len(told), agreed.float(), zero + len(told)]


def _key(layer: int, name: str, kind: str) -> str:
    """A parameter's name may hold no dot."""
    return f"{layer}/{name.replace('.', '/')}/{kind}"
