"""The fused soft cross-entropy and the teacher against plain formulas."""

from __future__ import annotations

import pytest
import torch

from drafters import losses
from drafters.losses import make_teacher, soft_cross_entropy


def _case(rows: int = 7, size: int = 5, vocab: int = 11, teachers: int = 4, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, size, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, size, generator=generator, dtype=dtype, requires_grad=True)
    probabilities = torch.softmax(torch.randn(teachers, vocab, generator=generator, dtype=dtype), -1)
    return hidden, weight, probabilities, torch.randint(0, teachers, (rows,), generator=generator)


def _plain(hidden, weight, probabilities, index):
    return -(probabilities[index] * torch.log_softmax(hidden @ weight.T, -1)).sum()


@pytest.mark.parametrize("chunk", [1, 22, 1 << 20])
def test_equals_the_plain_formula_whatever_the_chunk(monkeypatch, chunk):
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", chunk)
    case = _case()
    total, predicted = soft_cross_entropy(*case)
    expected = _plain(*case)
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-12)
    assert predicted.equal((case[0] @ case[1].T).argmax(-1))
    # A factor in front proves that backward scales what forward kept.
    mine = torch.autograd.grad(total * 3.0, case[:2])
    theirs = torch.autograd.grad(expected * 3.0, case[:2])
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_gradcheck():
    hidden, weight, probabilities, index = _case()
    assert torch.autograd.gradcheck(lambda h, w: soft_cross_entropy(h, w, probabilities, index)[0], (hidden, weight))


def test_frozen_head_gets_no_gradient_and_hidden_the_same_one():
    hidden, weight, probabilities, index = _case()
    expected = torch.autograd.grad(soft_cross_entropy(hidden, weight, probabilities, index)[0], hidden)[0]
    frozen = weight.detach()
    soft_cross_entropy(hidden, frozen, probabilities, index)[0].backward()
    assert hidden.grad.equal(expected)
    assert frozen.grad is None


def test_no_rows_is_a_zero_that_can_be_differentiated():
    hidden, weight, probabilities, _ = _case()
    total, predicted = soft_cross_entropy(hidden[:0], weight, probabilities, torch.zeros(0, dtype=torch.int64))
    total.backward()
    assert total.item() == 0.0 and predicted.numel() == 0
    assert weight.grad.abs().sum().item() == 0.0


def test_bfloat16_parameters_keep_an_fp32_loss():
    hidden, weight, probabilities, index = _case(dtype=torch.float32)
    low = soft_cross_entropy(hidden.bfloat16(), weight.bfloat16(), probabilities, index)[0]
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, _plain(hidden, weight, probabilities, index), rtol=2e-2, atol=0)


def test_teacher_is_the_targets_softmax_within_the_draft_vocabulary(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    head, last = torch.randn(9, 4, generator=generator), torch.randn(6, 4, generator=generator)
    kept = torch.tensor([0, 2, 3, 7])
    to_draft = torch.full((9,), -1)
    to_draft[kept] = torch.arange(4)
    full = last @ head.T
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 8)
    teacher = make_teacher(last, head[kept], full.argmax(-1), to_draft)
    torch.testing.assert_close(teacher.probabilities, torch.softmax(full[:, kept], -1))
    assert teacher.choice.tolist() == [to_draft[i].item() for i in full.argmax(-1)]
    assert (teacher.choice == -1).any() and (teacher.choice >= 0).any()
