"""Trees over every supported kind of attention equal transformers' own forward over each node's own text."""

import random

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.gguf.utils import GgufLinear
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from drafters.batches import mask4d
from drafters.config import TargetConfig
from drafters.errors import TargetError
from drafters.target import Target
from runtime.forward import TargetRunner
from runtime.packing import PackedLinear, pack_linears
from runtime.tree import DraftTree

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
HYBRID = ["sliding_attention", "sliding_attention", "full_attention"] * 2
CONFIGS = {
    "full": ("qwen3", {}),
    "hybrid, Gemma 3": ("gemma3_text", {"sliding_window": 9, "layer_types": HYBRID, "query_pre_attn_scalar": 8}),
    "sliding everywhere, Mistral": ("mistral", {"sliding_window": 9}),
    "hybrid, Qwen 2": ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3}),
    "softcapped, Gemma 2": (
        "gemma2",
        {"sliding_window": 9, "layer_types": HYBRID, "attn_logit_softcapping": 0.5, "final_logit_softcapping": None},
    ),
    "sinks, gpt-oss": (
        "gpt_oss",
        {"sliding_window": 9, "layer_types": HYBRID, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}


def build(kind: str, **more) -> AutoModelForCausalLM:
    model_type, settings = CONFIGS[kind]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**SIZES, **settings, **more}, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for name, parameter in model.named_parameters():  # far from the near-uniform attention of a fresh model
        with torch.no_grad():
            parameter.mul_(6 if "q_proj" in name or "k_proj" in name else 2 if parameter.dim() > 1 else 1)
    return model


def as_target(model, tokenizer=None) -> Target:
    return Target(model, tokenizer, TargetConfig(name="random"), None, (1,))


def random_tree(rng: random.Random, root: int, size: int) -> DraftTree:
    tokens, parents, depths, used = [root], [-1], [0], set()
    while len(tokens) < size:
        parent, token = rng.randrange(len(tokens)), rng.randrange(3, 96)
        if depths[parent] < 6 and (parent, token) not in used:
            used.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return DraftTree(tuple(tokens), tuple(parents), tuple(depths))


def path_to(tree: DraftTree, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = tree.parents[node]
    return path[::-1]


@pytest.mark.parametrize("kind", CONFIGS)
@torch.inference_mode()
def test_trees_equal_sequential_decoding_past_the_window(kind):
    """Ragged rows, one idle, slots scattered by many rounds of partial acceptance; 1e-5 at every node."""
    reference, runner = build(kind), TargetRunner(as_target(build(kind)), 3, 160, (2, 4))
    rng = random.Random(0)
    texts = {0: [rng.randrange(3, 96) for _ in range(23)], 2: [rng.randrange(3, 96) for _ in range(5)]}
    for row, text in texts.items():
        hidden, taps = runner.prefill(row, text)
        expected = reference.base_model(torch.tensor([text]), output_hidden_states=True)
        assert torch.allclose(hidden, expected.last_hidden_state, atol=1e-5)
        assert torch.allclose(taps, torch.cat([expected.hidden_states[i] for i in (2, 4)], -1), atol=1e-5)
    for _ in range(8):
        trees = [random_tree(rng, rng.randrange(3, 96), rng.randrange(1, 14)) for _ in range(3)]
        trees[1] = None
        hidden, _, slots = runner.run(0, trees, [len(texts.get(row, [])) for row in range(3)])
        for row, text in texts.items():
            tree = trees[row]
            for node in range(len(tree)):
                tokens = text + [tree.tokens[i] for i in path_to(tree, node)]
                expected = reference.base_model(torch.tensor([tokens])).last_hidden_state[0, -1]
                assert torch.allclose(hidden[row, node], expected, atol=1e-5), (row, node)
            kept = path_to(tree, rng.randrange(len(tree)))
            runner.cache.commit(row, slots[row], [slots[row][node] for node in kept])
            text += [tree.tokens[node] for node in kept]
    assert min(map(len, texts.values())) > 18  # twice the window


@torch.inference_mode()
def test_a_long_prompt_is_read_in_pieces_where_a_window_needs_masks(monkeypatch):
    monkeypatch.setattr("runtime.forward.CHUNK", 16)
    kind = "hybrid, Gemma 3"
    reference, runner = build(kind), TargetRunner(as_target(build(kind)), 1, 100, (3,))
    text = [3 + i * i % 90 for i in range(57)]
    hidden, taps = runner.prefill(0, text)
    expected = reference.base_model(torch.tensor([text]), output_hidden_states=True)
    assert torch.allclose(hidden, expected.last_hidden_state, atol=1e-5)
    assert torch.allclose(taps, expected.hidden_states[3], atol=1e-5)


def test_a_prompt_over_a_row_in_use_is_an_error():
    runner = TargetRunner(as_target(build("full")), 1, 64, ())
    runner.prefill(0, [3, 4, 5])
    with pytest.raises(RuntimeError, match="row 0 holds 3 tokens"):
        runner.prefill(0, [3])


def test_widths_read_stay_few_over_a_long_text():
    runner = TargetRunner(as_target(build("full")), 1, 250, ())
    runner.prefill(0, [3, 4, 5])
    widths = set()
    for position in range(3, 240):
        _, _, slots = runner.run(0, [DraftTree.chain(5, [6, 7])], [position])
        widths.add(runner.cache.layers[0].window.width)
        runner.cache.commit(0, slots[0], slots[0][:1])
    assert widths == {64, 128, 192, 250}


def test_windows_are_read_per_layer_type():
    assert as_target(build("hybrid, Gemma 3")).windows == {"sliding_attention": 9, "full_attention": None}
    assert as_target(build("sliding everywhere, Mistral")).windows == {"sliding_attention": 9}
    assert as_target(build("full")).windows == {"full_attention": None}


@torch.inference_mode()
@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if not kind.startswith(("softcapped", "sinks"))])
@pytest.mark.parametrize("lengths", [(23,), (10,), (14, 31)], ids=["one text", "one over", "two in a row"])
def test_what_drafters_learn_from_sees_no_further_than_the_target_does(kind, lengths):
    """Rows of training data are longer than a window: a drafter must not be taught what serving never shows it."""
    model = build(kind)
    texts = [[3 + (i * i + size) % 90 for i in range(size)] for size in lengths]
    wanted = [model.base_model(torch.tensor([text]), output_hidden_states=True) for text in texts]
    ids, positions = torch.tensor([sum(texts, [])]), torch.cat([torch.arange(size) for size in lengths])[None]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    masks = [mask4d(documents)] + ([None] if len(lengths) == 1 else [])
    model.set_attn_implementation("sdpa")  # as a target is loaded
    for mask in masks:
        taps, last = as_target(model).hidden(ids, positions, mask, (3,))
        assert torch.allclose(last[0], torch.cat([out.last_hidden_state[0] for out in wanted]), atol=1e-5)
        assert torch.allclose(taps[0], torch.cat([out.hidden_states[3][0] for out in wanted]), atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "settings", "says"),
    [
        ("qwen3_next", {}, "layer 0 is of kind 'linear_attention'.*a rejected draft cannot be taken out"),
        (
            "lfm2",
            {"layer_types": ["conv", "full_attention"] * 3},
            "layer 0 is of kind 'conv'.*a rejected draft cannot be taken out",
        ),
        ("llama4_text", {}, "layer 0 is of kind 'chunked_attention'.*supported are full_attention and sliding"),
        ("gemma3_text", {"use_bidirectional_attention": True, "sliding_window": 9}, "use_bidirectional_attention=true"),
    ],
)
def test_kinds_that_cannot_roll_back_are_refused_by_name(model_type, settings, says):
    config = CONFIG_MAPPING[model_type](num_hidden_layers=6, **settings)
    model = torch.nn.Module()
    model.config = config
    with pytest.raises(TargetError, match=says):
        as_target(model).windows  # noqa: B018


class Halves(torch.nn.Linear):
    """A quantiser's own linear layer: its products differ from those of a plain one."""

    def forward(self, x):
        return super().forward(x).half().float()


class Wrapped(torch.Tensor):
    """A quantiser's own kind of weight."""


def gguf_blocks(child: torch.nn.Linear) -> torch.nn.Module:
    kind = gguf.GGMLQuantizationType.Q8_0
    own = GgufLinear(child.in_features, child.out_features, kind.value)
    own.weight.data = torch.from_numpy(gguf.quants.quantize(child.weight.detach().numpy(), kind))
    return own


def own_class(child: torch.nn.Linear) -> torch.nn.Module:
    own = Halves(child.in_features, child.out_features, bias=False)
    own.weight = child.weight
    return own


def own_tensor(child: torch.nn.Linear) -> torch.nn.Module:
    child.weight = torch.nn.Parameter(child.weight.data.as_subclass(Wrapped), requires_grad=False)
    return child


def test_gguf_blocks_stay_packed():
    """Their kernel comes from the hub, so they are not run here."""
    model = torch.nn.Sequential(gguf_blocks(torch.nn.Linear(64, 32, bias=False)), torch.nn.Linear(32, 32))
    pack_linears(model)
    assert type(model[0]) is GgufLinear
    assert isinstance(model[1], PackedLinear)


@pytest.mark.parametrize("quantise", [own_class, own_tensor])
@torch.inference_mode()
def test_layers_of_a_quantisers_own_kind_run_and_are_left_alone(quantise):
    model, reference = build("full"), build("full")
    for one in (model, reference):
        for name, child in list(one.named_modules()):
            if type(child) is torch.nn.Linear and "mlp" in name:
                one.set_submodule(name, quantise(child))
    runner = TargetRunner(as_target(model), 1, 64, ())
    kept = [module for name, module in model.named_modules() if name.endswith("_proj") and "mlp" in name]
    assert len(kept) == 18
    assert not any(isinstance(module, PackedLinear) for module in kept)
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == 25  # attention and the head
    runner.prefill(0, [3, 4, 5, 6])
    hidden, _, _ = runner.run(0, [DraftTree((7, 8, 9), (-1, 0, 0), (0, 1, 1))], [4])
    for node, text in enumerate([[3, 4, 5, 6, 7], [3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 7, 9]]):
        expected = reference.base_model(torch.tensor([text])).last_hidden_state[0, -1]
        assert torch.allclose(hidden[0, node], expected, atol=1e-5 if quantise is not own_class else 1e-2)
