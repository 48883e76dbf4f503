"""Block-plus-diagonal attention against a dense softmax over all its entries."""

from __future__ import annotations

import pytest
import torch

from drafters.models import attention
from drafters.models.attention import Segment, block_diagonal_attention

SEGMENTS = [Segment(0, 3, 0, 5), Segment(3, 5, 5, 9)]
REACH = torch.tensor([1, 3, 4, 7, 8])


def _case(steps: int, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(steps)

    def draw(heads: int, rows: int) -> torch.Tensor:
        return torch.randn(heads, rows, 4, generator=generator, dtype=dtype, requires_grad=True)

    q, keys, values = draw(4, 5), draw(2, 9), draw(2, 9)
    return q, keys, values, [draw(2, 5) for _ in range(steps)], [draw(2, 5) for _ in range(steps)]


def _dense(q, keys, values, diagonal_keys, diagonal_values):
    """Every query against every key, position by position, one head at a time."""
    starts = {row: s.k_start for s in SEGMENTS for row in range(s.q_start, s.q_end)}
    heads = []
    for head in range(q.shape[0]):
        shared, rows = head // 2, []
        for row in range(q.shape[1]):
            seen = slice(starts[row], int(REACH[row]) + 1)
            k = torch.cat([keys[shared, seen], *[d[shared, row : row + 1] for d in diagonal_keys]])
            v = torch.cat([values[shared, seen], *[d[shared, row : row + 1] for d in diagonal_values]])
            rows.append(torch.softmax(q[head, row] @ k.T / 2.0, -1) @ v)
        heads.append(torch.stack(rows))
    return torch.stack(heads)


@pytest.mark.parametrize("block", [1, 2, 256])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_equals_dense_forward_and_gradient(monkeypatch, steps, block):
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    q, keys, values, dk, dv = _case(steps)
    mine = block_diagonal_attention(q, keys, values, list(zip(dk, dv, strict=True)), SEGMENTS, REACH)
    dense = _dense(q, keys, values, dk, dv)
    torch.testing.assert_close(mine, dense, rtol=0, atol=1e-12)
    weights = torch.linspace(-1, 1, mine.numel(), dtype=mine.dtype).view_as(mine)
    inputs = [q, keys, values, *dk, *dv]
    for got, wanted in zip(
        torch.autograd.grad((mine * weights).sum(), inputs),
        torch.autograd.grad((dense * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_gradcheck():
    q, keys, values, dk, dv = _case(2)

    def run(*inputs):
        flat = list(zip(inputs[3:5], inputs[5:7], strict=True))
        return block_diagonal_attention(*inputs[:3], flat, SEGMENTS, REACH)

    assert torch.autograd.gradcheck(run, (q, keys, values, *dk, *dv))


def test_saves_no_score_matrix_for_backward():
    saved: list[int] = []
    q, keys, values, dk, dv = _case(2)

    def note(tensor):
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        block_diagonal_attention(q, keys, values, list(zip(dk, dv, strict=True)), SEGMENTS, REACH)
    largest_input = max(x.numel() for x in (q, keys, values))
    assert max(saved) <= largest_input
