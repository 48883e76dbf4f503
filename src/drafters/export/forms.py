"""The dialects an export can be written in for other engines, and what each of them cannot say."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from drafters import artifacts
from drafters.config_export import DIALECTS, check_family
from drafters.errors import ConfigError
from drafters.export.card import dialect_card
from drafters.export.eagle import eagle_sglang_problem, eagle_vllm_problem, write_eagle_sglang, write_eagle_vllm
from drafters.export.eagle3 import eagle3_problem, write_eagle3
from drafters.export.gguf import gguf_problem, write_gguf
from drafters.export.heads import medusa_v1_problem, medusa_v2_problem, write_medusa, write_medusa_vllm
from drafters.export.merged import merged_problem, write_merged
from drafters.export.mtp import mtp_problem, write_mtp_deepseek, write_mtp_qwen3next
from drafters.export.small import write_small
from drafters.export.source import Source
from drafters.export.speculators import speculators_problem, write_speculators

log = logging.getLogger(__name__)

KIND = "dialect"
WIDENED = (
    "The format has no place for a draft vocabulary: engines draft over all {vocab_size} ids with the target's own "
    "output head. The drafter was trained on {draft_vocab_size} of them and never learned to say the others."
)


def no_problem(source: Source) -> None:
    """Whatever the family's drafters are, the dialect can say it."""


@dataclass(frozen=True)
class Form:
    """One dialect. families: whose drafters it is for. writer: fills an empty folder. problem: what of a drafter it
    cannot say, in words, or None. whole_vocabulary: it has no place for a draft vocabulary. use: for the card."""

    name: str
    families: tuple[str, ...]
    writer: Callable[[Source, Path], None]
    problem: Callable[[Source], str | None] = no_problem
    whole_vocabulary: bool = False
    use: str = ""

    def check(self, source: Source) -> None:
        """Raise ConfigError naming export.dialect, what the dialect cannot say, and which dialects can."""
        check_family([self.name], source.contract.family)
        problem = self.problem(source)
        if problem is None:
            return
        family = source.contract.family
        fitting = [each.name for each in FORMS.values() if family in each.families and each.problem(source) is None]
        way_out = f"Set export.dialect to {' or '.join(fitting)}" if fitting else "No dialect can: leave it out"
        raise ConfigError(f"export.dialect={self.name} cannot hold this drafter: {problem}. {way_out}.")

    def write(self, source: Source, folder: Path) -> None:
        """Fill an existing empty folder; ConfigError as check() raises it, before anything is written."""
        self.check(source)
        if self.widens(source):
            log.warning("export.dialect=%s: %s", self.name, WIDENED.format(**source.graph))
        self.writer(source, folder)

    def widens(self, source: Source) -> bool:
        """Whether what is written drafts from more ids than the drafter does."""
        return self.whole_vocabulary and source.reduced


def _form(name: str, writer: Callable[[Source, Path], None], use: str, **rest: object) -> Form:
    return Form(name, DIALECTS[name], writer, use=use, **rest)


FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        _form(
            "eagle3",
            write_eagle3,
            'Official EAGLE-3 names, as SpecForge writes them. vLLM: `--speculative-config \'{"method": "eagle3", '
            '"model": "<this folder>", "num_speculative_tokens": 3}\'`. SGLang: `--speculative-algorithm EAGLE3 '
            "--speculative-draft-model-path <this folder>`, with `config.sglang.json`, where there is one, in place of "
            "`config.json`.",
            problem=eagle3_problem,
        ),
        _form(
            "speculators",
            write_speculators,
            "The layout of `speculators`. vLLM: `vllm serve <this folder>` loads the target too, from "
            "`speculators_config.verifier.name_or_path` of `config.json`.",
            problem=speculators_problem,
        ),
        _form(
            "eagle-vllm",
            write_eagle_vllm,
            'EAGLE-1 as vLLM reads it: `--speculative-config \'{"method": "eagle", "model": "<this folder>", '
            '"num_speculative_tokens": 3}\'`.',
            problem=eagle_vllm_problem,
            whole_vocabulary=True,
        ),
        _form(
            "eagle-sglang",
            write_eagle_sglang,
            "EAGLE-1 as SGLang reads it: `--speculative-algorithm EAGLE --speculative-draft-model-path <this folder>`.",
            problem=eagle_sglang_problem,
            whole_vocabulary=True,
        ),
        _form(
            "medusa-v1",
            write_medusa,
            "Medusa's first layout, an output head in every head. TGI: `--speculate N` and the folder as model id.",
            problem=medusa_v1_problem,
        ),
        _form(
            "medusa-v2",
            write_medusa,
            "Medusa's second layout, heads on the target's output head. TGI reads it with one block a head: "
            "`--speculate N` and the folder as model id.",
            problem=medusa_v2_problem,
            whole_vocabulary=True,
        ),
        _form(
            "medusa-vllm",
            write_medusa_vllm,
            'Medusa as vLLM read it until 0.32: `--speculative-config \'{"model": "<this folder>", '
            '"num_speculative_tokens": 3}\'`. Newer versions have no Medusa.',
        ),
        _form(
            "medusa2-merged",
            write_merged,
            "The tuned target itself, a whole model, with Medusa heads as `medusa_head.*` among its tensors, as "
            "axolotl has them. transformers loads the model and leaves the heads.",
            problem=merged_problem,
            whole_vocabulary=True,
        ),
        _form(
            "mtp-deepseek",
            write_mtp_deepseek,
            "DeepSeek-V3's names around a dense layer of the target's kind. Engines that read these names expect the "
            "layer of the models that ship such a module.",
            problem=mtp_problem,
            whole_vocabulary=True,
        ),
        _form(
            "mtp-qwen3next",
            write_mtp_qwen3next,
            "Qwen3-Next's names around a dense layer of the target's kind; norm weights are factors as in the target, "
            "where Qwen3-Next's own are factors less one.",
            problem=mtp_problem,
            whole_vocabulary=True,
        ),
        _form(
            "small",
            write_small,
            "A whole LlamaForCausalLM with the target's tokenizer. transformers: `assistant_model`; vLLM: `method: "
            "draft_model`; SGLang: `--speculative-algorithm STANDALONE`.",
            whole_vocabulary=True,
        ),
        _form(
            "gguf",
            write_gguf,
            "GGUF files of the drafter and of its target for llama.cpp, whose draft type is `eagle3`.",
            problem=gguf_problem,
        ),
    )
}


def write_form(name: str, source: Source, dest: Path) -> Path:
    """Write a dialect and its card as a sealed folder of kind 'dialect' and return its absolute path.

    Raises ConfigError as Form.check does, ArtifactError as write_folder does.
    """
    form = FORMS[name]
    form.check(source)
    card = (source.folder / "README.md").read_text(encoding="utf-8")

    def write(folder: Path) -> None:
        form.write(source, folder)
        note = WIDENED.format(**source.graph) if form.widens(source) else ""
        (folder / "README.md").write_text(dialect_card(card, name, form.use, note), encoding="utf-8")

    return artifacts.write_folder(dest, write, KIND, {"dialect": name, "family": source.contract.family})
