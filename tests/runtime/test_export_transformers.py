"""transformers drafts with an exported small model: the text is the target's, and it accepts what the runtime does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from drafters.config_drafter import SmallConfig
from drafters.export import describe_drafter, export_drafter
from drafters.export.forms import write_form
from drafters.models import SmallDrafter
from drafters.target import Target
from runtime import Engine, SamplingParams
from tests.drafters.forms_setup import source_of
from tests.drafters.training_setup import make_records, new_drafter, run_settings

WHOLE = 512  # the tiny target's vocabulary
TOKENS, DRAFTS = 20, 4
PROMPTS = [[5, 40, 9, 77, 301], [33, 2, 400, 21, 17, 90]]


@pytest.fixture(scope="module")
def target(tiny_target, tiny_config) -> Target:
    """No engine has laid it out, which transformers' own caches would not know."""
    return Target.load(tiny_config)


def written(target: Target, root: Path, wild: bool) -> tuple[Path, Path]:
    """A small model of all the target's layers, or of two with random weights: its export, and the folder that other
    engines read."""
    cfg = SmallConfig(draft_vocab_size=WHOLE, num_layers=2 if wild else target.num_layers)
    drafter: SmallDrafter = new_drafter(target, make_records(4), run_settings(target, drafter=cfg))
    drafter.start_from(target, range(cfg.num_layers))
    if wild:
        torch.manual_seed(3)
        for parameter in (p for p in drafter.parameters() if p.requires_grad and p.dim() > 1):
            nn.init.normal_(parameter, std=0.2)
    contract = describe_drafter(drafter, target, taps=(), steps=cfg.steps, max_length=64)
    export = export_drafter(drafter, target, contract, root / "native", command="python train.py")
    return export, write_form("small", source_of(export, target), root / "small")


def assisted(target: Target, folder: Path) -> tuple[list[list[int]], int]:
    """What transformers generates with the folder as assistant, and how many drafts were accepted over all prompts."""
    assistant = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    settings = assistant.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = DRAFTS, "constant"
    settings.assistant_confidence_threshold = 0.0
    forwards: list[int] = []
    hook = target.model.register_forward_hook(lambda *given: forwards.append(1))
    texts = [generated(target, prompt, assistant_model=assistant) for prompt in PROMPTS]
    hook.remove()
    return texts, sum(map(len, texts)) - len(forwards)


def generated(target: Target, prompt: list[int], **options: object) -> list[int]:
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, **options
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("wild", [False, True], ids=["all layers", "random"])
def test_the_text_is_the_targets_and_acceptance_the_runtimes(target, tmp_path, wild):
    plain = [generated(target, prompt) for prompt in PROMPTS]
    export, folder = written(target, tmp_path, wild)
    texts, theirs = assisted(target, folder)
    assert texts == plain
    engine = Engine.load(Target.load(target.config), str(export), num_draft_tokens=DRAFTS + 1, depth=DRAFTS, top_k=1)
    results = engine.generate(PROMPTS, SamplingParams(TOKENS))
    assert [result.token_ids for result in results] == plain
    ours = sum(result.stats.accepted for result in results)
    # transformers drafts before the first token too, and the last round may hold a draft more or less.
    assert abs(theirs - ours) <= 2 * len(PROMPTS)
    assert ours < 10 if wild else ours > 0.7 * sum(map(len, plain))
