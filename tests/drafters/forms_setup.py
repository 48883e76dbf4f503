"""Native exports of every family for the tiny target, their dialects, and a process that reads them back."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drafters.adapter import FOLDER, Adapter
from drafters.config import Eagle3Config
from drafters.config_drafter import (
    DrafterConfig,
    EagleConfig,
    HydraConfig,
    Medusa2Config,
    MedusaConfig,
    MtpConfig,
    SmallConfig,
)
from drafters.export import describe_drafter, export_drafter, load_drafter
from drafters.export.source import Source
from drafters.target import Target
from tests.drafters.training_setup import make_records, new_drafter, run_settings
from tests.helpers import ROOT

RECORDS = make_records(4)
WHOLE = 512  # the tiny target's vocabulary
KINDS: dict[str, DrafterConfig] = {
    "eagle3": Eagle3Config(draft_vocab_size=128, ttt_steps=2, curriculum=[], fc_norm=True),
    "eagle": EagleConfig(draft_vocab_size=300),
    "medusa-own": MedusaConfig(draft_vocab_size=WHOLE, num_heads=2, num_layers=2, own_heads=True),
    "medusa-few": MedusaConfig(draft_vocab_size=300, num_heads=2, own_heads=True),
    "medusa": MedusaConfig(draft_vocab_size=300, num_heads=3),
    "medusa2": Medusa2Config(draft_vocab_size=300, num_heads=2, lora_rank=4),
    "mtp": MtpConfig(draft_vocab_size=300),
    "small": SmallConfig(draft_vocab_size=300, num_layers=2),
    "hydra": HydraConfig(draft_vocab_size=300, num_heads=2, num_layers=1),
}
# Every dialect with the drafters it is written from here.
WRITTEN = (
    ("eagle3", "eagle3"),
    ("speculators", "eagle3"),
    ("eagle-vllm", "eagle"),
    ("eagle-sglang", "eagle"),
    ("medusa-v1", "medusa-own"),
    ("medusa-v2", "medusa"),
    ("medusa-vllm", "medusa"),
    ("medusa-vllm", "medusa-own"),
    ("medusa-vllm", "medusa-few"),
    ("medusa2-merged", "medusa2"),
    ("mtp-deepseek", "mtp"),
    ("mtp-qwen3next", "mtp"),
    ("small", "small"),
)


def native(target: Target, dest: Path, cfg: DrafterConfig) -> Path:
    """The export of a drafter with random weights, none of them at rest; the target is tuned where it tunes one."""
    drafter = new_drafter(target, RECORDS, run_settings(target, drafter=cfg))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name not in drafter.borrowed:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    tuned = drafter.tuned(target)
    taps = drafter.taps_for(cfg, tuned)
    contract = describe_drafter(drafter, tuned, taps=taps, steps=cfg.steps, max_length=64)
    return export_drafter(drafter, tuned, contract, dest, command="python train.py")


def source_of(folder: Path, target: Target) -> Source:
    """An export as a dialect is written from it."""
    if (folder / FOLDER).is_dir():
        target = target.with_adapter(Adapter.read(folder / FOLDER))
    drafter, contract = load_drafter(folder, target)
    return Source(drafter, contract, target, folder)


# ---- the names once more, from the file's side


@dataclass(frozen=True)
class Inverse:
    """rules: what a name of the file becomes; left_out: names of the file that are not the drafter's own."""

    rules: tuple[tuple[str, str], ...] = ()
    left_out: str = "-"

    def own(self, name: str) -> str | None:
        if re.fullmatch(self.left_out, name):
            return None
        for pattern, wanted in self.rules:
            name = re.sub(f"^{pattern}$", wanted, name)
        return name


def inverse(dialect: str, layers: int) -> Inverse:
    """How a file of the dialect is read back. layers: blocks of a Medusa head."""
    medusa = ((r"(\d+)\.(\d+)\.(.*)", r"heads.\1.\2.\3"),)
    return {
        "eagle3": Inverse(),
        "speculators": Inverse(((r"layers\.0\.(.*)", r"midlayer.\1"),), r"embed_tokens\.weight"),
        "eagle-vllm": Inverse(((r"layers\.0\.(.*)", r"block.\1"), (r"fc\.(.*)", r"block.fc.\1"))),
        "eagle-sglang": Inverse(((r"layers\.0\.(.*)", r"block.\1"), (r"fc\.(.*)", r"block.fc.\1")), r"fc\.bias"),
        "medusa-v1": Inverse(medusa),
        "medusa-v2": Inverse(medusa),
        "medusa-vllm": Inverse(
            (
                (r"blocks\.(\d+)\.layers\.(\d+)\.(.*)", r"heads.\1.\2.linear.\3"),
                (r"lm_heads\.(\d+)\.weight", rf"heads.\1.{layers}.weight"),
            ),
            r"lm_head\.weight|token_map",
        ),
        "medusa2-merged": Inverse(((r"medusa_head\.(.*)", r"\1"), *medusa), r"model\..*|lm_head\.weight"),
        "mtp-deepseek": Inverse(left_out=r".*\.(embed_tokens|shared_head\.head)\.weight"),
        "mtp-qwen3next": Inverse(
            (
                (r"mtp\.fc\.weight", "model.layers.8.eh_proj.weight"),
                (r"mtp\.pre_fc_norm_embedding\.weight", "model.layers.8.enorm.weight"),
                (r"mtp\.pre_fc_norm_hidden\.weight", "model.layers.8.hnorm.weight"),
                (r"mtp\.norm\.weight", "model.layers.8.shared_head.norm.weight"),
                (r"mtp\.layers\.0\.(.*)", r"model.layers.8.\1"),
            ),
            r"model\.embed_tokens\.weight|lm_head\.weight",
        ),
        "small": Inverse(((r"model\.(.*)", r"\1"),), r"model\.embed_tokens\.weight|lm_head\.weight"),
    }[dialect]


# ---- a process of its own


def read_back(jobs: list[tuple[str, str, str]], target_folder: str) -> list[dict[str, list[str]]]:
    """For (dialect, its folder, the native export): tensors that differ or are missing by the names above, and by the
    reader of public folders; both empty where the drafter came back bit for bit."""
    from safetensors.torch import load_file

    from drafters.config import TargetConfig
    from drafters.contract import read_contract
    from drafters.export.dialect import DIALECTS
    from drafters.public import read_public

    def load(path: str) -> Target:
        return Target.load(TargetConfig(name="tiny-random", path=path, dtype="float32", device="cpu"))

    plain, found = load(target_folder), []
    for dialect, folder, export in jobs:
        contract = read_contract(Path(export))
        kind = DIALECTS[contract.family]
        wanted = load_file(Path(export) / kind.weights)
        names = {kind.rename(own): own for own in source_names(contract)}
        wanted = {names[name]: tensor for name, tensor in wanted.items() if name in names}
        files = sorted(Path(folder).glob("*.safetensors"))
        there = {name: tensor for file in files for name, tensor in load_file(file).items()}
        rules = inverse(dialect, contract.graph.get("num_layers", 0))
        mine = {own: tensor for name, tensor in there.items() if (own := rules.own(name)) is not None}
        target = load(folder) if dialect == "medusa2-merged" else plain
        theirs = read_public(Path(folder), target).tensors
        vocab = {"d2t", "t2d"}
        widened = contract.family != "eagle3"
        skip = vocab if widened or dialect == "speculators" and "d2t" not in there else set()
        found.append(
            {
                "names": differing(wanted, mine, skip),
                "reader": differing(wanted, theirs, vocab if widened else set()),
                "vocabulary": [str(int(theirs["t2d"].sum())), str(contract.graph["draft_vocab_size"])],
            }
        )
    return found


def source_names(contract) -> set[str]:
    """The tensors of an export under the drafter's own names."""
    from drafters.export.native import build

    with torch.device("meta"):
        return set(build(contract).exported_state())


def differing(wanted: dict[str, Tensor], found: dict[str, Tensor], skip: set[str]) -> list[str]:
    """Names that are in one of both only, or whose tensors differ in a bit."""
    wrong = (set(wanted) ^ set(found)) - skip
    for name in (set(wanted) & set(found)) - skip:
        a, b = wanted[name], found[name]
        same = a.dtype == b.dtype and a.shape == b.shape
        if not (same and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))):
            wrong.add(name)
    return sorted(wrong)


def read_back_elsewhere(jobs: list[tuple[str, str, str]], target: Target) -> list[dict[str, list[str]]]:
    """read_back() in a fresh process."""
    given = json.dumps([jobs, str(target.folder)])
    code = "import json,sys; from tests.drafters.forms_setup import read_back; " \
        "print('RESULT' + json.dumps(read_back(*json.loads(sys.argv[1]))))"  # fmt: skip
    environment = dict(os.environ) | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code, given], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("RESULT")[2])
