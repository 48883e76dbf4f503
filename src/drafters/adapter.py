"""LoRA adapters of a target (arXiv 2106.09685), by peft and in its layout: in the graph to train, merged to decode."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafters.attention_kinds import as_given, attention_windows, text_masks
from drafters.errors import ArtifactError, ConfigError, TargetError

if TYPE_CHECKING:
    # Not imported where nothing is tuned: peft takes half a second.
    from peft import LoraConfig, PeftModel
    from peft.tuners.lora import LoraLayer

FOLDER = "adapter"  # in an export folder
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's own names
# Who wrote an adapter and for which model, not what it computes.
LABELS = frozenset({"base_model_name_or_path", "revision", "inference_mode", "peft_version"})
REMEDY = "Copy the folder again, or export it again."


@dataclass(frozen=True)
class LoraShape:
    """What peft builds: factors of `rank` beside the linear layers named by the last part of their names."""

    rank: int
    alpha: int
    dropout: float
    targets: tuple[str, ...]

    def config(self, base: str | None = None) -> LoraConfig:
        """peft's settings; base: the model they are for."""
        from peft import LoraConfig

        config = LoraConfig(
            r=self.rank, lora_alpha=self.alpha, lora_dropout=self.dropout, target_modules=list(self.targets),
            task_type="CAUSAL_LM", base_model_name_or_path=base,
        )  # fmt: skip
        # A set would be written in another order by every process.
        config.target_modules = sorted(self.targets)
        return config


@dataclass(frozen=True)
class Adapter:
    """Trained factors, fp32 on the CPU, by peft's names: A [rank, in] and B [out, rank] of each layer."""

    shape: LoraShape
    tensors: dict[str, Tensor]

    @cached_property
    def sha256(self) -> str:
        """Of everything that changes a number: sizes, scale and factors; neither dropout nor labels."""
        factors = [
            [name, list(tensor.shape), hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()]
            for name, tensor in sorted(self.tensors.items())
        ]
        scale = [self.shape.rank, self.shape.alpha, sorted(self.shape.targets)]
        return hashlib.sha256(json.dumps([scale, factors]).encode()).hexdigest()

    def save(self, folder: Path, base: str) -> None:
        """Write peft's two files; base: the label of the target."""
        folder.mkdir()
        config = self.shape.config(base)
        config.inference_mode = True
        config.save_pretrained(str(folder))
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, folder / WEIGHTS)

    @classmethod
    def read(cls, folder: Path) -> Adapter:
        """Read an adapter; ArtifactError names the file, or the setting that this code would not apply."""
        from peft import LoraConfig

        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise ArtifactError(f"{folder / name} is missing. {REMEDY}")
        try:
            raw = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            known = {field.name for field in fields(LoraConfig)}
            # What another version of peft knows and this adapter does not use changes nothing.
            used = {key: value for key, value in raw.items() if key in known or value}
            found = LoraConfig(**used)
            shape = LoraShape(found.r, found.lora_alpha, found.lora_dropout, tuple(sorted(found.target_modules)))
            wanted, given = shape.config().to_dict(), found.to_dict() | {"peft_type": raw["peft_type"]}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArtifactError(f"{folder / CONFIG} is no LoRA of linear layers ({error}). {REMEDY}") from error
        for key in sorted((set(wanted) | set(given)) - LABELS - {"target_modules"}):
            if wanted.get(key) != given.get(key):
                raise ArtifactError(
                    f"{folder / CONFIG}: {key} is {given.get(key)!r}, this code applies {wanted.get(key)!r}. {REMEDY}"
                )
        try:
            tensors = load_file(folder / WEIGHTS)
        except SafetensorError as error:
            raise ArtifactError(f"{folder / WEIGHTS} is not a safetensors file ({error}). {REMEDY}") from error
        return cls(shape, {name: tensor.float() for name, tensor in tensors.items()})


# ---- which layers


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers and its name in the model; TargetError where there is none."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise TargetError(
            f"a {model.config.model_type!r} target has no list of decoder layers to tune. Set another drafter, or "
            "target.path to a Llama-like target."
        )
    return next(name for name, module in model.named_modules() if module is layers), layers


def can_be_tuned(model: PreTrainedModel) -> bool:
    """Whether the decoder has linear layers as the model came with; an engine on a CPU puts its own in their place."""
    return any(_is_linear(module) for module in decoder_layers(model)[1].modules())


def layer_sizes(model: PreTrainedModel, wanted: Sequence[str] | None) -> tuple[int, dict[str, list[int]]]:
    """How many decoder layers there are, and [out, in] of the linear layers to tune in each, by name.

    wanted: last parts of their names, e.g. q_proj; None: all. Raises ConfigError naming one that no layer has,
    TargetError where the layers differ.
    """
    _, layers = decoder_layers(model)
    each = [
        {name: [child.out_features, child.in_features] for name, child in layer.named_modules() if _is_linear(child)}
        for layer in layers
    ]
    if not each[0]:
        raise TargetError(
            "the target's decoder has no plain linear layer to tune: it is quantised, or an engine has laid it out for "
            "decoding. Load it anew, or set target.path to an unquantised target."
        )
    odd = next((index for index, found in enumerate(each) if found != each[0]), None)
    if odd is not None:
        raise TargetError(
            f"decoder layer {odd} of the target has the linear layers {each[odd]}, layer 0 {each[0]}: only targets "
            "whose layers are alike can be tuned. Set another drafter."
        )
    known = {name.rpartition(".")[2] for name in each[0]}
    for name in wanted or ():
        if name not in known:
            raise ConfigError(
                f"drafter.lora_targets names {name!r}, the target's decoder layers have {', '.join(sorted(known))}. "
                "Set some of these, or null for all."
            )
    chosen = known if wanted is None else set(wanted)
    return len(layers), {name: size for name, size in each[0].items() if name.rpartition(".")[2] in chosen}


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear


# ---- on a model


def share(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model's modules over the very same tensors."""
    tensors = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, tensors).eval()


def attach(model: PreTrainedModel, shape: LoraShape, factors: Mapping[str, Tensor]) -> PeftModel:
    """Put LoRA layers with these very factors into a model, in place; parameters stay the caller's own.

    Raises TargetError naming a factor that is missing, unused or of another size.
    """
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 asks transformers 5 by an old name
        # On the meta device: the factors are put in below, and no random number is drawn.
        tuned = get_peft_model(model, shape.config(), autocast_adapter_dtype=False, low_cpu_mem_usage=True)
    left = dict(factors)
    for name, layer in lora_layers(tuned):
        for kind, module in (("lora_A", layer.lora_A["default"]), ("lora_B", layer.lora_B["default"])):
            full = f"{name}.{kind}.weight"
            size = list(module.weight.shape)
            if full not in left or list(left[full].shape) != size:
                found = list(left[full].shape) if full in left else "missing"
                raise TargetError(f"adapter: {full} is {found}, the target needs {size}. {REMEDY}")
            given = left.pop(full)
            own = given if isinstance(given, nn.Parameter) else nn.Parameter(given, requires_grad=False)
            module.weight = own
    if left:
        raise TargetError(f"adapter: {sorted(left)[0]} belongs to no layer of the target. {REMEDY}")
    return tuned


def lora_layers(model: PeftModel) -> list[tuple[str, LoraLayer]]:
    """The LoRA layers of a model and their names."""
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


@torch.no_grad()
def merge(model: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """The model with an adapter's change in its weights, summed in fp32; given weights are replaced, not written to."""
    device = model.get_input_embeddings().weight.device
    tuned = attach(model, adapter.shape, {name: tensor.to(device) for name, tensor in adapter.tensors.items()})
    for _, layer in lora_layers(tuned):
        linear = layer.get_base_layer()
        linear.weight = nn.Parameter(linear.weight.clone(), requires_grad=False)
        layer.merge()  # adds the factors' product, which is fp32, and rounds once
    return tuned.unload().eval().requires_grad_(False)


class TunedTarget:
    """A target with LoRA layers in its graph, whose factors are somebody else's parameters.

    No module: DeepSpeed is to see the factors, which their owner registers, and nothing of the target.
    """

    def __init__(self, model: PreTrainedModel, shape: LoraShape, factors: Mapping[str, nn.Parameter]) -> None:
        """Shares every tensor of `model`, which stays as it is; factors by peft's names."""
        self.model = attach(share(model), shape, factors).eval()
        self.windows = attention_windows(model.config.get_text_config(), model.name_or_path)
        self._dropouts = [layer.lora_dropout for _, layer in lora_layers(self.model)]

    def train(self, mode: bool) -> None:
        """Switch the dropout before the factors; the target's own layers are never in training mode."""
        for dropout in self._dropouts:
            dropout.train(mode)

    def last_hidden(self, ids: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        """Last hidden state after the final norm [B, T, Ht]; ids, position_ids [B, T], mask bool [B, 1, T, T]."""
        backbone = self.model.get_base_model().base_model
        masks = as_given(text_masks(self.windows, mask, position_ids))
        out = backbone(input_ids=ids, position_ids=position_ids, attention_mask=masks, use_cache=False)
        return out.last_hidden_state

    @torch.no_grad()
    def original(self, *inputs: Tensor) -> Tensor:
        """last_hidden() of the target alone, bit for bit."""
        with self.model.disable_adapter():
            return self.last_hidden(*inputs)
