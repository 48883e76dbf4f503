import copy

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from runtime.attention import grouped_attention
from runtime.packing import HALF_CHANGE, FastRMSNorm, PackedLinear, fits_half, pack_linears, prepare


@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear_equals_the_plain_one(bias):
    linear = nn.Linear(48, 32, bias=bias)
    packed = PackedLinear(linear)
    x = torch.randn(5, 3, 48)
    with torch.inference_mode():
        assert torch.allclose(packed(x), linear(x), atol=1e-5)
    assert torch.equal(packed.weight, linear.weight)


def test_each_rows_product_ignores_the_other_rows():
    """What makes a verified token equal a plainly decoded one: bit for bit where oneDNN multiplies."""
    packed = PackedLinear(nn.Linear(64, 96, bias=False))
    assert not packed.as_half
    x = torch.randn(16, 64)
    with torch.inference_mode():
        whole = packed(x)
        for rows in (1, 2, 5, 16):
            assert torch.equal(packed(x[:rows]), whole[:rows])


def test_bfloat16_products_are_rounded_float32_products():
    linear = nn.Linear(64, 32, bias=False).to(torch.bfloat16)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        out = PackedLinear(linear)(x)
        assert out.dtype == torch.bfloat16
        exact = (x.double() @ linear.weight.double().T).to(torch.bfloat16)
        assert (out.float() - exact.float()).abs().max() <= 2**-7 * exact.float().abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_weight_of_a_half_precision_checkpoint_is_stored_as_half_and_multiplied_in_float32(dtype, bias):
    linear = nn.Linear(64, 32, bias=bias).to(torch.bfloat16).to(dtype)
    packed = PackedLinear(linear)
    assert packed.as_half
    assert (packed.weight.float() - linear.weight.float()).abs().max() <= HALF_CHANGE
    x = torch.randn(7, 64).to(dtype)
    with torch.inference_mode():
        exact = x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
        error = (packed(x).double() - exact).abs().max()
        assert error <= (2e-6 if dtype == torch.float32 else 2**-8 * exact.abs().max())
        assert packed(x[:0]).shape == (0, 32)


@pytest.mark.parametrize(("number", "fits"), [(1.0, True), (0.1, False), (1 + 2**-12, False), (1e5, False)])
def test_a_weight_that_half_precision_would_change_is_not_stored_as_half(number, fits):
    weight = torch.tensor([[0.5, number]])
    assert fits_half(weight) == fits


def test_only_the_tiniest_numbers_of_a_half_precision_weight_may_change():
    tiny = torch.tensor([[2.0**-20 * (1 + 2.0**-7)]])
    assert fits_half(tiny)
    assert 0 < (tiny.half().float() - tiny).abs() <= HALF_CHANGE


def test_a_drafters_head_is_packed_like_its_other_layers(random_drafter):
    drafter = prepare(copy.deepcopy(random_drafter))
    kinds = {type(module) for module in drafter.modules() if hasattr(module, "out_features")}
    assert kinds == {PackedLinear}


def test_pack_linears_replaces_every_linear_once():
    module = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4)))
    pack_linears(module)
    kinds = [type(m) for m in module.modules()]
    assert kinds.count(PackedLinear) == 2
    assert nn.Linear not in kinds
    before = module[0]
    pack_linears(module)
    assert module[0] is before


def test_grouped_attention_equals_repeated_keys():
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask = torch.rand(2, 1, 5, 9) > 0.4
    mask[..., 0] = True
    k3, v3 = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k3, v3, attn_mask=mask, scale=0.3)
    assert torch.allclose(grouped_attention(q, k, v, mask, 0.3), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_replaced_by_ones_that_give_the_same(dtype):
    norm = LlamaRMSNorm(48, eps=1e-5)
    norm.weight.data = torch.rand(48)
    model = nn.Sequential(nn.Linear(8, 48), norm).to(dtype)
    x = torch.randn(2, 5, 48).to(dtype)
    with torch.inference_mode():
        expected = norm(x)
        prepare(model)
        assert isinstance(model[0], PackedLinear) and isinstance(model[1], FastRMSNorm)
        torch.testing.assert_close(model[1](x), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-9)
        assert torch.isfinite(model[1](torch.zeros(1, 1, 48, dtype=dtype))).all()


def test_a_norm_of_another_kind_stays():
    class Shifted(LlamaRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states) + hidden_states

    module = nn.Sequential(Shifted(16), nn.LayerNorm(16))
    kinds = [type(m) for m in prepare(module)]
    assert kinds == [Shifted, nn.LayerNorm]
