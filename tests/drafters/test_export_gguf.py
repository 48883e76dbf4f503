"""GGUF for llama.cpp: every number of drafter and target, in its order and under its names, or a refusal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, TokenType
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedTokenizerFast

from drafters.errors import ConfigError
from drafters.export.forms import FORMS, write_form
from drafters.export.gguf import DRAFTER_NAME, TARGET_NAME, interleaved
from drafters.export.gguf_vocab import LLAMA3_PATTERN, add_vocab, vocab_problem
from drafters.export.source import Source
from drafters.target import Target
from tests.drafters.export_setup import SHAPE, TAPS, build_drafter, describe, export
from tests.drafters.forms_setup import source_of

DIM = 24  # of a head of the drafter


@pytest.fixture(scope="module")
def fresh(tiny_target, tiny_config) -> dict[torch.dtype, Target]:
    """Targets that no engine has touched, by dtype."""
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    return {dtype: Target.load(replace(tiny_config, dtype=name)) for dtype, name in names.items()}


@pytest.fixture(scope="module")
def sources(fresh, tmp_path_factory) -> dict[torch.dtype, Source]:
    root = tmp_path_factory.mktemp("native")
    return {dtype: source_of(export(target, root / str(dtype)), target) for dtype, target in fresh.items()}


@pytest.fixture(scope="module")
def folders(sources, tmp_path_factory) -> dict[torch.dtype, Path]:
    root = tmp_path_factory.mktemp("gguf")
    return {dtype: write_form("gguf", source, root / str(dtype)) for dtype, source in sources.items()}


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Tensors by name in torch's order of sizes."""
    found = {}
    for tensor in GGUFReader(path).tensors:
        values = torch.from_numpy(tensor.data.copy())
        found[tensor.name] = values.view(torch.bfloat16) if tensor.tensor_type == GGMLQuantizationType.BF16 else values
    return found


def said(path: Path) -> dict[str, object]:
    return {key: field.contents() for key, field in GGUFReader(path).fields.items()}


def paired(weight: Tensor, dim: int) -> Tensor:
    """Rows of heads of width dim: channel c of the first half comes 2c-th, its partner of the second half after it."""
    order = [row - row % dim + (row % dim % 2) * (dim // 2) + row % dim // 2 for row in range(len(weight))]
    return weight[order]


# ---- the drafter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_drafter_is_there_bit_for_bit(folders, sources, dtype):
    wanted = {
        "fc.weight": "fc.weight",
        "blk.0.attn_norm.weight": "midlayer.input_layernorm.weight",
        "blk.0.attn_norm_2.weight": "midlayer.hidden_norm.weight",
        "blk.0.attn_v.weight": "midlayer.self_attn.v_proj.weight",
        "blk.0.attn_output.weight": "midlayer.self_attn.o_proj.weight",
        "blk.0.ffn_norm.weight": "midlayer.post_attention_layernorm.weight",
        "blk.0.ffn_gate.weight": "midlayer.mlp.gate_proj.weight",
        "blk.0.ffn_up.weight": "midlayer.mlp.up_proj.weight",
        "blk.0.ffn_down.weight": "midlayer.mlp.down_proj.weight",
        "output_norm.weight": "norm.weight",
        "output.weight": "lm_head.weight",
    }
    found, own = tensors_of(folders[dtype] / DRAFTER_NAME), load_file(sources[dtype].folder / "model.safetensors")
    for there, here in wanted.items():
        assert torch.equal(found.pop(there), own[here].to(torch.float32 if own[here].dim() == 1 else dtype)), there
    for part in "qk":
        weight = own[f"midlayer.self_attn.{part}_proj.weight"].to(dtype)
        assert torch.equal(found.pop(f"blk.0.attn_{part}.weight"), paired(weight, DIM))
    ids = found.pop("d2t")
    assert ids.dtype == torch.int64 and torch.equal(ids, own["t2d"].nonzero().flatten()) and not found


def test_the_drafter_says_its_graph(folders):
    fields = said(folders[torch.float32] / DRAFTER_NAME)
    wanted = {
        "general.architecture": "eagle3",
        "eagle3.block_count": 1,
        "eagle3.context_length": SHAPE.max_position_embeddings,
        "eagle3.embedding_length": SHAPE.hidden_size,
        "eagle3.feed_forward_length": SHAPE.intermediate_size,
        "eagle3.attention.head_count": SHAPE.num_heads,
        "eagle3.attention.head_count_kv": SHAPE.num_kv_heads,
        "eagle3.attention.key_length": DIM,
        "eagle3.attention.value_length": DIM,
        "eagle3.rope.dimension_count": DIM,
        "eagle3.rope.freq_base": SHAPE.rope_theta,
        "eagle3.vocab_size": SHAPE.vocab_size,
        "eagle3.target_layers": list(TAPS),
        "eagle3.target_hidden_size": SHAPE.target_hidden_size,
        "eagle3.norm_before_residual": False,
        "eagle3.norm_before_fc": False,
    }
    assert {key: fields[key] for key in wanted} == wanted
    assert fields["eagle3.attention.layer_norm_rms_epsilon"] == pytest.approx(SHAPE.rms_norm_eps)


def test_a_variant_that_llama_cpp_knows_is_said(fresh, tmp_path):
    shape = replace(SHAPE, norm_before_fc=True, norm_before_residual=True, own_embedding=True, draft_vocab_size=512)
    target = fresh[torch.float32]
    source = source_of(export(target, tmp_path / "native", shape), target)
    path = write_form("gguf", source, tmp_path / "gguf") / DRAFTER_NAME
    found, fields = tensors_of(path), said(path)
    assert fields["eagle3.norm_before_fc"] and fields["eagle3.norm_before_residual"]
    assert torch.equal(found["enc.output_norm.weight"], source.weights["input_norm.weight"].float())
    assert torch.equal(found["token_embd.weight"], source.weights["embed_tokens.weight"].float())
    assert "d2t" not in found


def test_neighbours_turn_as_halves_do():
    torch.manual_seed(0)
    heads, dim, width = 3, 8, 5
    q, k = (torch.randn(heads * dim, width, dtype=torch.float64) for _ in range(2))
    x, y = torch.randn(2, width, dtype=torch.float64)
    angle = torch.arange(1, dim // 2 + 1, dtype=torch.float64) / 7

    def halves(state: Tensor, steps: int) -> Tensor:
        first, second = state.view(heads, 2, dim // 2).unbind(1)
        cos, sin = (steps * angle).cos(), (steps * angle).sin()
        return torch.stack((first * cos - second * sin, second * cos + first * sin), 1).reshape(heads, dim)

    def neighbours(state: Tensor, steps: int) -> Tensor:
        pairs = torch.view_as_complex(state.view(heads, dim // 2, 2))
        return torch.view_as_real(pairs * torch.polar(torch.ones(dim // 2).double(), steps * angle)).reshape(heads, dim)

    wanted = (halves(q @ x, 4) * halves(k @ y, 1)).sum(-1)
    found = (neighbours(interleaved(q, heads) @ x, 4) * neighbours(interleaved(k, heads) @ y, 1)).sum(-1)
    torch.testing.assert_close(found, wanted)


# ---- the target


def test_transformers_reads_the_target_back(folders, fresh):
    target = fresh[torch.float32]
    unpacked = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(folders[torch.float32], gguf_file=TARGET_NAME, **unpacked)
    mine, theirs = target.model.state_dict(), model.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_target_is_there_in_its_own_dtype(folders, fresh, dtype):
    found = tensors_of(folders[dtype] / TARGET_NAME)
    stored = load_file(fresh[dtype].folder / "model.safetensors")
    assert len(found) == len(stored) and said(folders[dtype] / TARGET_NAME)["general.architecture"] == "llama"
    assert torch.equal(found["token_embd.weight"], stored["model.embed_tokens.weight"].to(dtype))
    query = stored["model.layers.3.self_attn.q_proj.weight"].to(dtype)
    assert torch.equal(found["blk.3.attn_q.weight"], paired(query, 16))
    assert {tensor.dtype for tensor in found.values() if tensor.dim() == 2} == {dtype}
    assert {tensor.dtype for tensor in found.values() if tensor.dim() == 1} == {torch.float32}


# ---- the tokenizer


def test_ids_keep_their_tokens_and_spare_rows_are_unused(folders, fresh):
    tokenizer = fresh[torch.float32].tokenizer
    for name in (DRAFTER_NAME, TARGET_NAME):
        fields = said(folders[torch.float32] / name)
        tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
        assert len(tokens) == len(types) == 512
        assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        control = {index for index, kind in enumerate(types) if kind == TokenType.CONTROL}
        assert control == set(tokenizer.all_special_ids) and types[-1] == TokenType.UNUSED
        assert fields["tokenizer.ggml.model"] == "gpt2" and fields["tokenizer.ggml.pre"] == "gpt-2"
        assert fields["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
        assert not fields["tokenizer.ggml.add_bos_token"] and not fields["tokenizer.ggml.add_eos_token"]
        assert fields["tokenizer.chat_template"] == tokenizer.chat_template


def tokenizer_with(pre: object, core: object = None, normalizer: object = None) -> PreTrainedTokenizerFast:
    alphabet = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(core or models.BPE(vocab=alphabet | {"ab": 256, "abc": 257}, merges=[("a", "b"), ("ab", "c")]))
    core.pre_tokenizer = pre
    if normalizer is not None:
        core.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=core)


class Kept:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.said: dict[str, object] = {}

    def __getattr__(self, name: str):
        return lambda value: self.said.__setitem__(name.removeprefix("add_"), value)


PLAIN = pre_tokenizers.ByteLevel(add_prefix_space=False)
NO_REGEX = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA3 = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
ALONE = pre_tokenizers.Split(Regex(r"\d"), "isolated")


@pytest.mark.parametrize(
    ("pre", "name"),
    [
        (PLAIN, "gpt-2"),
        (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), PLAIN]), "smollm"),
        (pre_tokenizers.Sequence([LLAMA3, NO_REGEX]), "llama-bpe"),
    ],
)
def test_how_text_is_cut_has_llama_cpps_name(pre, name):
    tokenizer, kept = tokenizer_with(pre), Kept()
    assert vocab_problem(tokenizer, 258) is None
    add_vocab(kept, tokenizer, 260)
    assert kept.said["tokenizer_pre"] == name and kept.said["token_merges"] == ["a b", "ab c"]
    assert kept.said["token_list"][255:] == [tokenizer.convert_ids_to_tokens(255), "ab", "abc", "[PAD258]", "[PAD259]"]


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        (tokenizer_with(NO_REGEX), "cuts text"),
        (tokenizer_with(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), PLAIN])), "cuts text"),
        (tokenizer_with(pre_tokenizers.Sequence([ALONE, NO_REGEX])), "cuts text"),
        (tokenizer_with(pre_tokenizers.ByteLevel(add_prefix_space=True)), "cuts text"),
        (tokenizer_with(PLAIN, normalizer=normalizers.NFC()), "not a byte-level BPE"),
        (tokenizer_with(PLAIN, models.Unigram([("a", 0.0)])), "not a byte-level BPE"),
    ],
)
def test_a_tokenizer_that_would_read_other_ids_is_refused(tokenizer, words):
    assert words in vocab_problem(tokenizer, 258)


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused():
    assert "id 257, its embedding 256 rows" in vocab_problem(tokenizer_with(PLAIN), 256)


# ---- refusals


@pytest.mark.parametrize(
    ("change", "taps", "words"),
    [
        ({"fc_norm": True}, TAPS, "drafter.fc_norm=true"),
        ({"norm_output": True}, TAPS, "drafter.norm_output=true"),
        ({"fc_bias": True}, TAPS, "its fc has a bias"),
        ({"attention_bias": True}, TAPS, "its attention has biases"),
        ({"qk_norm": True}, TAPS, "queries and keys pass a norm"),
        ({"num_taps": 2}, TAPS[:2], "it taps 2 states"),
        ({}, (2, 4, 8), "after the final norm"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(fresh, tmp_path, change, taps, words):
    target = fresh[torch.float32]
    drafter = build_drafter(target, replace(SHAPE, **change))
    source = Source(drafter, describe(drafter, target, taps), target, tmp_path)
    with pytest.raises(ConfigError, match=rf"export\.dialect=gguf cannot hold this drafter: .*{words}.* Set export"):
        FORMS["gguf"].check(source)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("attention_bias", True, "biases"),
        ("rope_parameters", {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, r"scaled \(linear\)"),
    ],
)
def test_a_target_that_is_not_written_is_refused(fresh, sources, monkeypatch, name, value, words):
    monkeypatch.setattr(fresh[torch.float32].text_config, name, value)
    with pytest.raises(ConfigError, match=rf"cannot hold this drafter: its target's .*{words}"):
        FORMS["gguf"].check(sources[torch.float32])


def test_a_target_in_half_precision_is_refused(sources, tiny_config):
    source = replace(sources[torch.float32], target=Target.load(replace(tiny_config, dtype="float16")))
    with pytest.raises(ConfigError, match=r"target\.dtype is torch\.float16; float32 and bfloat16 are written"):
        FORMS["gguf"].check(source)


def test_a_tensor_that_llama_cpp_has_no_place_for_is_named(fresh, sources, tmp_path, monkeypatch):
    from drafters.export import gguf

    stored, extra = gguf._stored, ("model.layers.0.extra.weight", torch.ones(2))
    monkeypatch.setattr(gguf, "_stored", lambda folder: [*stored(folder), extra])
    with pytest.raises(ConfigError, match=r"target 'tiny-random' has a tensor model\.layers\.0\.extra\.weight"):
        gguf.write_gguf(sources[torch.float32], tmp_path)


def test_a_target_of_another_kind_is_refused(sources):
    target = sources[torch.float32].target
    other = Target.__new__(Target)
    other.__dict__ |= target.__dict__
    other.model = torch.nn.Linear(1, 1)
    other.model.config = target.model.config
    with pytest.raises(ConfigError, match="its target is a Linear; only a LlamaForCausalLM"):
        FORMS["gguf"].check(replace(sources[torch.float32], target=other))
