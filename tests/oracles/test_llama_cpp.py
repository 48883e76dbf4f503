"""On the real target: llama.cpp, drafting with an exported EAGLE-3 drafter, gives the text of plain decoding and takes
as many drafts as the runtime does in a chain."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drafters.config import BuiltinData
from drafters.corpus import load_prompts
from drafters.export.forms import write_form
from drafters.export.gguf import DRAFTER_NAME, TARGET_NAME
from drafters.export.source import Source
from runtime import Engine, SamplingParams
from tests.drafters.forms_setup import source_of
from tests.oracles.oracle_setup import needs
from tests.test_real_target import KEPT, target  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.oracle, pytest.mark.slow, needs("xllamacpp")]
COUNT, TOKENS, DRAFTS = 8, 64, 4
RUNNER = Path(__file__).parent / "llama_cpp.py"
SPOKEN = ("It's 12345 o'clock\n\n  x = 3.14  # über naïve 東京 🙂\t\tend", "<|im_start|>user\nHi<|im_end|>\n")


@pytest.fixture(scope="module")
def source(target) -> Source:  # noqa: F811
    return source_of(KEPT, target)


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory) -> Path:
    return write_form("gguf", source, tmp_path_factory.mktemp("gguf") / "gguf")


@pytest.fixture(scope="module")
def prompts() -> list[list[dict[str, str]]]:
    return [list(prompt.messages) for prompt in load_prompts(BuiltinData(eval_prompts=40), "eval")[:COUNT]]


@pytest.fixture(scope="module")
def theirs(source, folder, prompts, target):  # noqa: F811
    """What llama.cpp finds with and without the drafter."""
    encode = Engine.load(target, "none").encode

    def run(drafter: str) -> dict[str, list]:
        job = {
            "target": str(folder / TARGET_NAME),
            "drafter": drafter,
            "drafts": DRAFTS,
            "tokens": TOKENS,
            "prompts": [encode(prompt) for prompt in prompts],
            "texts": SPOKEN,
            "found": str(folder.parent / "found.json"),
        }
        done = subprocess.run([sys.executable, RUNNER], input=json.dumps(job), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(Path(job["found"]).read_text())

    return {"plain": run(""), "drafted": run(str(folder / DRAFTER_NAME))}


def test_the_text_is_plain_decodings(target, prompts, theirs):  # noqa: F811
    plain = [result.text for result in Engine.load(target, "none").generate(prompts, SamplingParams(TOKENS))]
    for kind, found in theirs.items():
        assert [answer["choices"][0]["text"] for answer in found["answers"]] == plain, kind


def test_text_is_cut_into_the_targets_own_ids(target, theirs):  # noqa: F811
    assert theirs["plain"]["ids"] == [target.tokenizer(text)["input_ids"] for text in SPOKEN]


def test_as_many_drafts_are_accepted_as_in_our_own_chain(source, prompts, theirs, record_property):
    chain = {"num_draft_tokens": DRAFTS + 1, "depth": DRAFTS, "top_k": 1}
    engine = Engine.load(source.target, (source.drafter, source.contract.tap_indices), **chain)
    results = engine.generate(prompts, SamplingParams(TOKENS))
    ours = [result.stats.accepted for result in results]
    found = [answer["timings"]["draft_n_accepted"] for answer in theirs["drafted"]["answers"]]
    record_property("accepted", {"ours": ours, "llama.cpp": found})
    assert sum(ours) / sum(result.stats.rounds for result in results) > 0.3
    assert abs(sum(found) - sum(ours)) <= 0.05 * sum(ours), (found, ours)
    # The sum alone would let a tap one layer off, or heads in another order, pass for a near tie.
    assert max(abs(there - here) for there, here in zip(found, ours, strict=True)) <= 2, (found, ours)
