"""A Medusa-2 target with its adapter merged in and the heads beside it, as axolotl keeps them: one model's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import PreTrainedModel

from drafters.export.heads import medusa_name, reduced_heads
from drafters.export.source import Source, save_config

merged_problem = reduced_heads


def merged_config(source: Source, model: PreTrainedModel) -> dict[str, Any]:
    """Return the target's config.json with Medusa's fields; transformers reads it as the plain model."""
    graph = source.graph
    heads = {"medusa_num_heads": graph["num_heads"], "medusa_num_layers": graph["num_layers"]}
    layout = {} if graph["own_heads"] else {"version": "2"}
    config = json.loads(model.config.to_json_string())
    return config | {"architectures": [type(model).__name__]} | heads | layout


def model_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """A model's tensors, each once: a tied head is named by its embedding."""
    found: dict[str, Tensor] = {}
    places = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in places:
            found[name] = tensor
        places.add(tensor.data_ptr())
    return found


def write_merged(source: Source, folder: Path) -> None:
    """Write the tuned target in the dtype it is measured in, `medusa_head.*` among its tensors, and its tokenizer."""
    model = source.target.own_model()
    heads = {f"medusa_head.{medusa_name(name)}": tensor for name, tensor in source.weights.items()}
    save_torch_state_dict(model_tensors(model) | heads, folder, safe_serialization=True)
    save_config(folder, merged_config(source, model))
    model.generation_config.save_pretrained(folder)
    source.target.tokenizer.save_pretrained(folder, save_jinja_files=False)
