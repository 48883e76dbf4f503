"""DeepSpeed, and everything that knows how it stores things: set-up, optimiser tensors, whole weights."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drafters.config import TrainRun

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

ADAM_EPS = 1e-8


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Silence child processes: DeepSpeed test-links every optional op and lets the linker's errors through."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def init_distributed(device: torch.device) -> tuple[int, int]:
    """Join the process group torchrun describes, or a group of one; returns (rank, world size)."""
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone, MASTER_PORT=str(_free_port()))
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Imported here: it takes seconds, and nothing but training needs it.
    import deepspeed

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if not deepspeed.comm.is_initialized():
        # DeepSpeed would compile its shared-memory op at first use; a run killed meanwhile leaves a lock behind on
        # which every later run waits for ever. gloo does the same work; the table is DeepSpeed's own switch.
        with _quiet_stderr():
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo" if device.type == "cpu" else "nccl", verbose=False)
    return deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()


def engine_config(cfg: TrainRun, accumulation: int) -> dict[str, Any]:
    """Return the DeepSpeed configuration; lr is set by the trainer before each step."""
    trainer = cfg.trainer
    adam = {
        "lr": trainer.learning_rate,
        "betas": list(trainer.betas),
        "eps": ADAM_EPS,
        "weight_decay": trainer.weight_decay,
        "torch_adam": True,
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": trainer.clip_grad,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {"stage": cfg.deepspeed.zero_stage},
        "bf16": {"enabled": trainer.dtype == "bfloat16"},
        "steps_per_print": 1 << 62,
    }


def parameter_groups(
    model: nn.Module, weight_decay: float, rate_group: Callable[[str], str]
) -> list[dict[str, Any]]:
    """Group trainable parameters: matrices decay, norm weights and biases do not; `rate_group` of each by its name."""
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((rate_group(name), parameter.dim() > 1), []).append(parameter)
    return [
        {"params": groups[key], "weight_decay": weight_decay if key[1] else 0.0, "rate_group": key[0]}
        for key in sorted(groups, key=lambda key: (key[0], not key[1]))
    ]


def make_engine(
    model: nn.Module, cfg: TrainRun, accumulation: int, rate_group: Callable[[str], str]
) -> DeepSpeedEngine:
    """Wrap the training graph; the process group must exist. rate_group: see Drafter.rate_group."""
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=parameter_groups(model, cfg.trainer.weight_decay, rate_group),
        config=engine_config(cfg, accumulation),
        dist_init_required=False,
    )
    return engine


def set_learning_rate(engine: DeepSpeedEngine, value: float, rates: Mapping[str, float]) -> None:
    """Set the learning rate of every parameter group to `value` times what `rates` has for its rate_group."""
    for group in engine.optimizer.param_groups:
        group["lr"] = value * rates[group["rate_group"]]


def gradient_norm(engine: DeepSpeedEngine) -> Tensor | None:
    """Global gradient norm before clipping, at ZeRO stage 0 in fp32; None where the engine computes it itself.

    Call after the last backward and before step: stage 0 reduces gradients in backward.
    """
    if engine.zero_optimization() or engine.bfloat16_enabled():
        return None
    return torch.nn.utils.get_total_norm([p.grad for p in engine.module.parameters() if p.grad is not None])


def _masters(engine: DeepSpeedEngine) -> list[Tensor]:
    """The tensors the optimiser updates: parameters, or this rank's flat fp32 shards of them."""
    if engine.zero_optimization_stage() == 3:
        return engine.optimizer.fp32_partitioned_groups_flat
    return [p for group in engine.basic_optimizer.param_groups for p in group["params"]]


def optimizer_tensors(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """Return this rank's optimiser state as flat names: master weights, moments, step counts."""
    found: dict[str, Tensor] = {}
    for index, master in enumerate(_masters(engine)):
        found[f"{index}.master"] = master.detach()
        for name, value in engine.basic_optimizer.state[master].items():
            found[f"{index}.{name}"] = value.detach()
    return {name: value.cpu().contiguous() for name, value in found.items()}


def load_optimizer_tensors(engine: DeepSpeedEngine, tensors: dict[str, Tensor]) -> None:
    """Put what optimizer_tensors returned back; raises KeyError or RuntimeError on another layout."""
    for index, master in enumerate(_masters(engine)):
        master.data.copy_(tensors[f"{index}.master"])
        engine.basic_optimizer.state[master] = {
            "step": tensors[f"{index}.step"].clone(),
            "exp_avg": tensors[f"{index}.exp_avg"].to(master.device, copy=True),
            "exp_avg_sq": tensors[f"{index}.exp_avg_sq"].to(master.device, copy=True),
        }


@contextmanager
def whole_weights(engine: DeepSpeedEngine) -> Iterator[None]:
    """Hold full weights on every rank inside the block; only ZeRO-3 has anything to gather."""
    import deepspeed

    sharded = engine.zero_optimization_stage() == 3
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters) if sharded else nullcontext():
        yield
