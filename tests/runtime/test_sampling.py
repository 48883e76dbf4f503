import pytest
import torch

from runtime.sampling import SamplingParams, choose, keyed_gumbel


def test_gumbel_max_draws_the_target_distribution():
    """20,000 positions of one 4-token law: each frequency within four standard errors."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 20_000
    picks = choose(p.log().repeat(count, 1), list(range(count)), SamplingParams(temperature=1.0, seed=1))
    share = torch.bincount(picks, minlength=4) / count
    assert ((share - p).abs() < 4 * (p * (1 - p) / count).sqrt()).all()


def test_temperature_sharpens_the_law():
    p = torch.tensor([0.6, 0.4])
    half = choose(p.log().repeat(5000, 1), list(range(5000)), SamplingParams(temperature=0.5, seed=2))
    expected = 0.36 / (0.36 + 0.16)
    assert abs((half == 0).float().mean() - expected) < 4 * (expected * (1 - expected) / 5000) ** 0.5


def test_noise_is_a_function_of_seed_and_position():
    assert torch.equal(keyed_gumbel(3, 7, 9), keyed_gumbel(3, 7, 9))
    assert not torch.equal(keyed_gumbel(3, 7, 9), keyed_gumbel(3, 8, 9))
    assert not torch.equal(keyed_gumbel(3, 7, 9), keyed_gumbel(4, 7, 9))
    # "1/23" and "12/3" must not share a key
    assert not torch.equal(keyed_gumbel(1, 23, 9), keyed_gumbel(12, 3, 9))


def test_greedy_takes_the_first_of_equal_logits():
    assert choose(torch.tensor([[0.0, 2.0, 2.0]]), [0], SamplingParams()).tolist() == [1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_logit_names_the_position(value):
    logits = torch.zeros(3, 4)
    logits[1, 2] = value
    with pytest.raises(ValueError, match="position 11"):
        choose(logits, [10, 11, 12], SamplingParams())


@pytest.mark.parametrize(
    "settings, word",
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"stop": "end"}, "tuple"),
        ({"stop": ("",)}, "empty text"),
    ],
)
def test_bad_settings_say_what_to_set(settings, word):
    with pytest.raises(ValueError, match=word):
        SamplingParams(**settings)
