"""A model's layers laid out once for the CPU's kernels: packed linear layers, norms in few operations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafters.models.layers import DraftHead

PACKED_DTYPES = (torch.float32, torch.bfloat16)
PLAIN_LINEARS = (nn.Linear, DraftHead)
HALF_CHANGE = 2.0**-25  # most that fp16's smallest numbers round a bf16 weight: below fp32's own error in a product


class PackedLinear(nn.Module):
    """A bias-free or biased linear layer whose weight has been reordered once; plain F.linear does so on every call.

    A weight that fp16 holds (any that came from a bf16 or fp16 checkpoint) is stored as fp16 and multiplied in
    fp32: half the memory traffic, which is what one decode step costs. Other weights go through oneDNN as they
    are. On CPUs without bfloat16 instructions bf16 layers multiply in fp32 and round the result back.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach()
        self.dtype = weight.dtype
        self.in_features, self.out_features = linear.in_features, linear.out_features
        native = self.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.compute = torch.bfloat16 if native else torch.float32
        weight = weight.to(self.compute)
        bias = None if linear.bias is None else linear.bias.detach().to(self.compute)
        self.as_half = not native and fits_half(weight)
        width = 2 if self.as_half else self.compute.itemsize
        self.nbytes = weight.numel() * width + (0 if bias is None else bias.nbytes)  # as reordered
        if self.as_half:
            self.packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        else:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            self.bias = bias

    @property
    def weight(self) -> Tensor:
        """The plain weight [out, in], unpacked on demand."""
        plain = torch.ops.quantized.linear_unpack_fp16(self.packed)[0] if self.as_half else self.packed.to_dense()
        return plain.to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.compute)
        if self.as_half:
            out = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        else:
            out = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out.to(self.dtype)


def fits_half(weight: Tensor) -> bool:
    """Whether fp16 holds every number of an fp32 weight, the tiniest rounded by at most HALF_CHANGE."""
    engines = torch.backends.quantized.supported_engines
    return "fbgemm" in engines and bool(((weight.half().float() - weight).abs() <= HALF_CHANGE).all())


class FastRMSNorm(nn.Module):
    """A root-mean-square norm in 5 small operations instead of 8: on a CPU their number is what a short row costs."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.register_buffer("weight", weight.detach())
        self.register_buffer("eps", torch.tensor(eps))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.rsqrt(torch.addcmul(self.eps, size, size, value=1 / x.shape[-1]))
        return self.weight * (wide * scale).to(x.dtype)


def prepare(module: nn.Module) -> nn.Module:
    """Lays a frozen module's linear layers and norms out for decoding, in place; off the CPU it changes nothing."""
    pack_linears(module)
    for name, child in list(module.named_modules()):
        fast = _fast_norm(child)
        if fast is not None:
            module.set_submodule(name, fast)
    return module


@torch.no_grad()
def _fast_norm(module: nn.Module) -> FastRMSNorm | None:
    """A fast norm that was seen to give what this module gives; None where it is no such norm (Gemma's adds 1)."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or eps is None or weight.device.type != "cpu":
        return None
    fast = FastRMSNorm(weight, eps)
    probe = torch.linspace(-3, 3, 4 * len(weight), device=weight.device).view(4, -1).to(weight.dtype)
    return fast if torch.allclose(fast(probe), module(probe), rtol=4 * torch.finfo(weight.dtype).eps, atol=0) else None


def pack_linears(module: nn.Module) -> nn.Module:
    """Replaces each nn.Linear of a CPU module by a PackedLinear, in place.

    Other devices are left alone, and so is what a quantiser made: another class of linear layer or of Tensor.
    """
    for name, child in list(module.named_modules()):
        if type(child) not in PLAIN_LINEARS or type(child.weight.data) is not torch.Tensor:
            continue
        if child.weight.device.type == "cpu" and child.weight.dtype in PACKED_DTYPES:
            module.set_submodule(name, PackedLinear(child))
    return module
