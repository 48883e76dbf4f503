"""A small drafter, its export, and the ways to forge one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters import artifacts
from drafters.contract import Contract
from drafters.export import DataSummary, describe_drafter, export_drafter
from drafters.models.eagle3 import Eagle3Drafter, Eagle3Shape
from drafters.target import Target

SHAPE = Eagle3Shape(
    hidden_size=64,
    target_hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=24,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=512,
    vocab_size=512,
    draft_vocab_size=128,
)
OFFICIAL_NAMES = {
    "fc.weight": (64, 192),
    "midlayer.hidden_norm.weight": (64,),
    "midlayer.input_layernorm.weight": (64,),
    "midlayer.self_attn.q_proj.weight": (96, 128),
    "midlayer.self_attn.k_proj.weight": (48, 128),
    "midlayer.self_attn.v_proj.weight": (48, 128),
    "midlayer.self_attn.o_proj.weight": (64, 96),
    "midlayer.post_attention_layernorm.weight": (64,),
    "midlayer.mlp.gate_proj.weight": (96, 64),
    "midlayer.mlp.up_proj.weight": (96, 64),
    "midlayer.mlp.down_proj.weight": (64, 96),
    "norm.weight": (64,),
    "lm_head.weight": (128, 64),
    "d2t": (128,),
    "t2d": (512,),
}
TAPS = (2, 4, 5)
DATA = DataSummary(source="builtin", records=320, tokens=41000, self_generated=True)


def build_drafter(target: Target, shape: Eagle3Shape = SHAPE, kept: Tensor | None = None) -> Eagle3Drafter:
    drafter = Eagle3Drafter(shape)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else 0.2 * noise)
    if kept is None:
        kept = torch.randperm(shape.vocab_size, generator=generator)[: shape.draft_vocab_size].sort().values
    t2d = torch.zeros(shape.vocab_size, dtype=torch.bool)
    t2d[kept] = True
    drafter.bind_vocab(kept - torch.arange(shape.draft_vocab_size), t2d)
    drafter.bind_embedding(target.embed_weight)
    return drafter


def describe(drafter: Eagle3Drafter, target: Target, taps: tuple[int, ...] = TAPS) -> Contract:
    return describe_drafter(drafter, target, taps=taps, steps=3, max_length=128)


def export(target: Target, dest: Path, shape: Eagle3Shape = SHAPE, taps: tuple[int, ...] = TAPS) -> Path:
    drafter = build_drafter(target, shape)
    command = "python train.py target=tiny-random"
    return export_drafter(drafter, target, describe(drafter, target, taps), dest, command=command, data=DATA)


def reseal(folder: Path) -> None:
    """Make the manifest agree with what the folder holds now, as a careful forger would."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for name in manifest["files"]:
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "sha256": artifacts.sha256_file(folder / name)}
    path.write_text(json.dumps(manifest))


def edit_json(folder: Path, name: str, **changes: object) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    reseal(folder)


Edit = Callable[[dict[str, Tensor]], object]


def edit_tensors(folder: Path, edit: Edit, name: str = "model.safetensors") -> None:
    tensors = load_file(folder / name)
    edit(tensors)
    metadata = {"format_version": "1", "dtype": "float32"}
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name, metadata=metadata)
    reseal(folder)


def put(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name] = change(tensors[name])

    return edit


def retap(folder: Path, *indices: int) -> None:
    """Change the taps everywhere they are written."""
    taps = [f"output of block {index - 1} before norm" for index in indices]
    graph = json.loads((folder / "contract.json").read_text())["graph"] | {"num_taps": len(indices)}
    edit_json(folder, "contract.json", taps=taps, tap_indices=list(indices), graph=graph)
    edit_json(folder, "config.json", eagle_aux_hidden_state_layer_ids=list(indices))
