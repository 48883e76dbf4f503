"""Training objectives between the target's distribution p and the drafter's q, each with its gradient in the logits.

A rule maps logits [C, Vd] (which it may overwrite), p [C, Vd] and the objective's settings to the sum over rows and
the gradient of that sum [C, Vd]. With g = df/dq the gradient through the softmax is q * (g - sum_v q_v g_v).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from drafters.config_drafter import Objective

Rule = Callable[[Tensor, Tensor, Objective], tuple[Tensor, Tensor]]


def _log(probabilities: Tensor) -> Tensor:
    """Logarithm with the smallest normal number as floor: a softmax underflows to 0 where no logit is infinite."""
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()


def _through_softmax(q: Tensor, slope: Tensor) -> Tensor:
    return q * (slope - (q * slope).sum(-1, keepdim=True))


def _overlap(q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """alpha = sum_v min(p_v, q_v) [C, 1], the chance that a draft is accepted, and its gradient [C, Vd]."""
    return torch.minimum(q, p).sum(-1, keepdim=True), _through_softmax(q, (q < p).to(q.dtype))


def _kl(logits: Tensor, p: Tensor, _: Objective) -> tuple[Tensor, Tensor]:
    """Soft cross-entropy -sum p log q: KL(p || q) up to the entropy of p, which no gradient sees."""
    lse = torch.logsumexp(logits, dim=-1, keepdim=True)
    total = lse.sum() - torch.dot(p.view(-1), logits.view(-1))
    return total, logits.sub_(lse).exp_().sub_(p)


def _reverse_kl(logits: Tensor, p: Tensor, _: Objective) -> tuple[Tensor, Tensor]:
    """KL(q || p)."""
    log_q = torch.log_softmax(logits, -1)
    q, ratio = log_q.exp(), log_q - _log(p)
    return (q * ratio).sum(), _through_softmax(q, ratio)


def _jsd(logits: Tensor, p: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q (GKD, arXiv 2306.13649)."""
    beta, log_q = objective.beta, torch.log_softmax(logits, -1)
    q = log_q.exp()
    log_m = _log(beta * p + (1 - beta) * q)
    ratio = log_q - log_m
    total = beta * (torch.xlogy(p, p) - p * log_m).sum() + (1 - beta) * (q * ratio).sum()
    return total, (1 - beta) * _through_softmax(q, ratio)


def _tvd(logits: Tensor, p: Tensor, _: Objective) -> tuple[Tensor, Tensor]:
    """1 - alpha, the chance of a rejection (DistillSpec, arXiv 2310.08461)."""
    alpha, slope = _overlap(torch.softmax(logits, -1), p)
    return (1 - alpha).sum(), -slope


def _lk(logits: Tensor, p: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """l KL(p || q) + (1 - l)(1 - alpha), l = exp(-decay alpha) per row and constant (arXiv 2602.23881)."""
    log_q = torch.log_softmax(logits, -1)
    q = log_q.exp()
    alpha, slope = _overlap(q, p)
    share = torch.exp(-objective.decay * alpha)
    kl = (torch.xlogy(p, p) - p * log_q).sum(-1, keepdim=True)
    return (share * kl + (1 - share) * (1 - alpha)).sum(), share * (q - p) - (1 - share) * slope


def _lk_alpha(logits: Tensor, p: Tensor, _: Objective) -> tuple[Tensor, Tensor]:
    """-log alpha (arXiv 2602.23881)."""
    alpha, slope = _overlap(torch.softmax(logits, -1), p)
    alpha = alpha.clamp_min(torch.finfo(alpha.dtype).tiny)
    return -alpha.log().sum(), -slope / alpha


RULES: dict[str, Rule] = {
    "kl": _kl, "reverse_kl": _reverse_kl, "jsd": _jsd, "tvd": _tvd, "lk": _lk, "lk_alpha": _lk_alpha,
}  # fmt: skip
