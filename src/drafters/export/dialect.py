"""How each family's native export names its files and tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.contract import Contract
from drafters.export.eagle import eagle_configs, eagle_name
from drafters.export.heads import hydra_configs, hydra_name, medusa_configs, medusa_name
from drafters.export.mtp import mtp_configs
from drafters.export.official import CONFIG_NAME, official_configs
from drafters.export.small import small_complete, small_configs, small_name, small_repeated
from drafters.target import Target

__all__ = ["CONFIG_NAME", "DIALECTS", "EXPORT_DTYPE", "VOCAB_NAME", "Dialect"]

EXPORT_DTYPE = torch.bfloat16
VOCAB_NAME = "draft_vocab.safetensors"  # d2t and t2d, where the ecosystem's weights file has no place for them


def same(name: str) -> str:
    """The drafter's own tensor names are the ecosystem's."""
    return name


def nothing_repeated(contract: Contract, target: Target) -> dict[str, Tensor]:
    """What is borrowed is not saved: engines take it from the target."""
    return {}


def nothing_more(folder: Path, target: Target) -> None:
    """The folder is complete as it is."""


@dataclass(frozen=True)
class Dialect:
    """title: the family in prose. use: which engine reads the folder, for the card. weights: the file of tensors.
    vocab_inside: d2t and t2d are among them. configs: the JSON files engines read, config.json among them. rename: a
    drafter's tensor name to the file's. repeated: tensors of the target that the file holds too, under the
    file's names. complete: writes further files, for folders that stand alone."""

    title: str
    use: str
    weights: str
    vocab_inside: bool
    configs: Callable[[Contract, Target], dict[str, dict[str, Any]]]
    rename: Callable[[str], str] = same
    repeated: Callable[[Contract, Target], dict[str, Tensor]] = nothing_repeated
    complete: Callable[[Path, Target], None] = nothing_more


DIALECTS = {
    "eagle": Dialect(
        "EAGLE",
        "The names and config.json follow EAGLE-1's, which vLLM reads with `method: eagle` given; the engine drafts "
        "over the whole vocabulary with the target's own head, as it knows no `draft_vocab.safetensors`. SGLang needs "
        "a zero tensor `fc.bias` beside `fc.weight` and the architecture `LlamaForCausalLMEagle` in `config.json`.",
        "model.safetensors",
        False,
        eagle_configs,
        eagle_name,
    ),
    "eagle3": Dialect(
        "EAGLE-3",
        "The names and config.json follow the official EAGLE-3 layout, which vLLM (`method: eagle3`) and SGLang "
        "(`--speculative-algorithm EAGLE3`) read. With custom taps, SGLang needs `config.sglang.json` in place of "
        "`config.json`.",
        "model.safetensors",
        True,
        official_configs,
    ),
    "hydra": Dialect(
        "Hydra",
        "The names follow Hydra's own; no serving engine reads them.",
        "hydra_lm_head.safetensors",
        False,
        hydra_configs,
        hydra_name,
    ),
    "medusa": Dialect(
        "Medusa",
        "The names follow Medusa's own. TGI reads the folder where each head has one residual block, and output heads "
        "of their own only over the whole vocabulary; current vLLM and SGLang have no Medusa.",
        "medusa_lm_head.safetensors",
        False,
        medusa_configs,
        medusa_name,
    ),
    "medusa2": Dialect(
        "Medusa-2",
        "The heads' names follow Medusa's own, `adapter/` is a LoRA as peft writes it. Another engine has to serve the "
        "target with the adapter merged into it (peft: `PeftModel.from_pretrained`, `merge_and_unload`): the heads "
        "draft for no other.",
        "medusa_lm_head.safetensors",
        False,
        medusa_configs,
        medusa_name,
    ),
    "mtp": Dialect(
        "MTP",
        "The names follow DeepSeek-V3's MTP module (`model.layers.N.eh_proj` and so on), around a dense layer of the "
        "target's kind; embedding and output head are the target's. vLLM and SGLang read these names for the "
        "architectures that ship such a module.",
        "model.safetensors",
        False,
        mtp_configs,
    ),
    "small": Dialect(
        "Small-model",
        "The folder is a whole LlamaForCausalLM with the target's tokenizer: transformers takes it as "
        "`assistant_model`, vLLM as `method: draft_model`, SGLang as `--speculative-algorithm STANDALONE`. Ids outside "
        "`draft_vocab.safetensors` were not trained; Outrider leaves them out, other engines draft over all ids.",
        "model.safetensors",
        False,
        small_configs,
        small_name,
        small_repeated,
        small_complete,
    ),
}
