import pytest
import torch
from torch import nn

from runtime.attention import grouped_attention
from runtime.forward import PackedLinear, pack_linears


@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear_equals_the_plain_one(bias):
    linear = nn.Linear(48, 32, bias=bias)
    packed = PackedLinear(linear)
    x = torch.randn(5, 3, 48)
    with torch.inference_mode():
        assert torch.allclose(packed(x), linear(x), atol=1e-5)
    assert torch.equal(packed.weight, linear.weight)


def test_each_rows_product_ignores_the_other_rows():
    """What makes a verified token equal a plainly decoded one bit for bit, up to attention."""
    packed = PackedLinear(nn.Linear(64, 96, bias=False))
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
