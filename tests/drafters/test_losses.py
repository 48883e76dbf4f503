"""The fused objectives and the teacher against plain formulas."""

from __future__ import annotations

import pytest
import torch

from drafters import losses
from drafters.config_drafter import OBJECTIVES, Objective
from drafters.losses import Teacher, distillation_loss, make_teacher
from drafters.models.layers import DraftHead
from drafters.models.scoring import score
from drafters.objectives import RULES


def _case(rows: int = 7, size: int = 5, vocab: int = 11, teachers: int = 4, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, size, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, size, generator=generator, dtype=dtype, requires_grad=True)
    probabilities = torch.softmax(torch.randn(teachers, vocab, generator=generator, dtype=dtype), -1)
    return hidden, weight, probabilities, torch.randint(0, teachers, (rows,), generator=generator)


def _plain(hidden, weight, probabilities, index, objective):
    """The objectives as one writes them down, differentiated by autograd."""
    p, log_q = probabilities[index], torch.log_softmax(hidden @ weight.T, -1)
    q, alpha = log_q.exp(), torch.minimum(probabilities[index], log_q.exp()).sum(-1)
    kl = -(p * log_q).sum(-1)
    if objective.name == "kl":
        return kl.sum()
    kl = kl + torch.special.xlogy(p, p).sum(-1)
    if objective.name == "reverse_kl":
        return (q * (log_q - p.clamp_min(torch.finfo(p.dtype).tiny).log())).sum()
    if objective.name == "jsd":
        beta = objective.beta
        middle = beta * p + (1 - beta) * q
        forward = (torch.special.xlogy(p, p) - torch.special.xlogy(p, middle)).sum()
        return beta * forward + (1 - beta) * (torch.special.xlogy(q, q) - torch.special.xlogy(q, middle)).sum()
    if objective.name == "tvd":
        return 0.5 * (p - q).abs().sum()
    if objective.name == "lk_alpha":
        return -alpha.log().sum()
    share = torch.exp(-objective.decay * alpha.detach())
    return (share * kl + (1 - share) * (1 - alpha)).sum()


EACH = [*map(Objective, OBJECTIVES), Objective("jsd", beta=0.2), Objective("lk", decay=0.7)]
every_objective = pytest.mark.parametrize("objective", EACH, ids=lambda o: f"{o.name}-{o.beta}-{o.decay}")


def _agrees(case, objective: Objective, atol: float = 1e-12) -> None:
    total, predicted = distillation_loss(*case, objective)
    expected = _plain(*case, objective)
    torch.testing.assert_close(total, expected, rtol=0, atol=atol)
    assert predicted.equal((case[0] @ case[1].T).argmax(-1))
    # A factor in front proves that backward scales what forward kept.
    mine = torch.autograd.grad(total * 3.0, case[:2])
    theirs = torch.autograd.grad(expected * 3.0, case[:2])
    torch.testing.assert_close(mine, theirs, rtol=0, atol=atol)


@every_objective
@pytest.mark.parametrize("chunk", [1, 22, 1 << 20])
def test_equals_the_plain_formula_whatever_the_chunk(monkeypatch, chunk, objective):
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", chunk)
    _agrees(_case(), objective)


def test_every_objective_has_a_rule():
    assert tuple(RULES) == OBJECTIVES


@every_objective
def test_gradcheck(objective):
    hidden, weight, probabilities, index = _case()

    def total(h, w):
        return distillation_loss(h, w, probabilities, index, objective)[0]

    if objective.name == "lk":  # its gradient holds the share of KL constant: no difference quotient equals it
        _agrees((hidden, weight, probabilities, index), objective)
    else:
        assert torch.autograd.gradcheck(total, (hidden, weight))


@every_objective
def test_one_row(objective):
    _agrees(_case(rows=1, teachers=1), objective)


@every_objective
def test_targets_that_rule_tokens_out_and_drafts_that_are_sure(objective):
    hidden, weight, probabilities, index = _case()
    probabilities[0] = torch.eye(11, dtype=torch.float64)[3]
    probabilities[1, ::2] = 0.0
    probabilities[1] /= probabilities[1].sum()
    sure = (hidden * 20).detach().requires_grad_()  # q near one-hot, mostly beside p
    _agrees((hidden, weight, probabilities, index), objective, atol=1e-11)
    _agrees((sure, weight, probabilities, index), objective, atol=1e-9)


@every_objective
def test_a_draft_surer_than_fp32_can_say_stays_finite(objective):
    hidden, weight, probabilities, index = _case(dtype=torch.float32)
    probabilities[:] = torch.eye(11)[[1, 3, 5, 7]]
    wild = (hidden * 400).detach().requires_grad_()
    total, _ = distillation_loss(wild, weight, probabilities, index, objective)
    assert total.isfinite()
    assert all(g.isfinite().all() for g in torch.autograd.grad(total, (wild, weight)))


@every_objective
def test_a_perfect_draft_has_the_least_loss_and_no_slope(objective):
    hidden, weight, _, _ = _case()
    with torch.no_grad():
        own = torch.softmax(hidden @ weight.T, -1)
    total, _ = distillation_loss(hidden, weight, own, torch.arange(7), objective)
    entropy = -(own * own.log()).sum() if objective.name == "kl" else 0.0
    assert abs(total.item() - float(entropy)) < 1e-12
    if objective.name in ("kl", "reverse_kl", "jsd"):  # min(p, q) has a kink where p equals q
        assert all(g.abs().max() < 1e-12 for g in torch.autograd.grad(total, (hidden, weight)))


def test_soft_cross_entropys_gradient_is_what_it_was_bit_for_bit():
    hidden, weight, probabilities, index = _case(rows=40, size=16, vocab=90, dtype=torch.float32)
    total, _ = distillation_loss(hidden, weight, probabilities, index, Objective("kl"))
    found = torch.autograd.grad(total, (hidden, weight))
    with torch.no_grad():
        logits, wanted = torch.nn.functional.linear(hidden, weight), probabilities[index]
        lse = torch.logsumexp(logits, dim=-1, keepdim=True)
        before = lse.sum() - torch.dot(wanted.view(-1), logits.view(-1))
        slope = logits.sub_(lse).exp_().sub_(wanted)
        assert total.equal(before)
        assert found[0].equal(torch.mm(slope, weight)) and found[1].equal(slope.T @ hidden)


@every_objective
def test_frozen_head_gets_no_gradient_and_hidden_the_same_one(objective):
    hidden, weight, probabilities, index = _case()
    expected = torch.autograd.grad(distillation_loss(hidden, weight, probabilities, index, objective)[0], hidden)[0]
    frozen = weight.detach()
    distillation_loss(hidden, frozen, probabilities, index, objective)[0].backward()
    assert hidden.grad.equal(expected)
    assert frozen.grad is None


@every_objective
def test_no_rows_is_a_zero_that_can_be_differentiated(objective):
    hidden, weight, probabilities, index = _case()
    total, predicted = distillation_loss(hidden[:0], weight, probabilities, index[:0], objective)
    total.backward()
    assert total.item() == 0.0 and predicted.numel() == 0
    assert weight.grad.abs().sum().item() == 0.0


@every_objective
def test_bfloat16_parameters_keep_an_fp32_loss(objective):
    hidden, weight, probabilities, index = _case(dtype=torch.float32)
    low = distillation_loss(hidden.bfloat16(), weight.bfloat16(), probabilities, index, objective)[0]
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, _plain(hidden, weight, probabilities, index, objective), rtol=3e-2, atol=0)


@every_objective
def test_a_choice_outside_the_draft_vocabulary_has_no_loss_and_is_a_miss(objective):
    hidden, weight, probabilities, index = _case()
    head = DraftHead(5, 11).double()
    head.weight = torch.nn.Parameter(weight.detach().clone())
    best = (hidden @ weight.T).argmax(-1)
    teacher = Teacher(probabilities, torch.tensor([-1, 3, -1, 7]))
    total, right = score(head, hidden, teacher, index, objective)
    inside = teacher.choice[index] >= 0
    assert 0 < inside.sum() < len(index)
    torch.testing.assert_close(total, _plain(hidden[inside], weight, probabilities, index[inside], objective))
    assert right.equal(inside & (best == teacher.choice[index]))
    assert torch.autograd.grad(total, hidden)[0][~inside].abs().sum() == 0


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
