import math

import pytest
import torch

from runtime.sampling import Noise, SamplingParams, choose, drawing_noise, keyed, keyed_gumbel


def test_gumbel_max_draws_the_target_distribution():
    """5,000 positions of one 4-token law: each frequency within four standard errors."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 5000
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


def splitmix64(key: int, index: int) -> int:
    """The generator as published, in whole numbers without torch."""
    wrap = (1 << 64) - 1
    bits = (key + (index + 1) * 0x9E3779B97F4A7C15) & wrap
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & wrap
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & wrap
    return bits ^ (bits >> 31)


def test_noise_is_splitmix64_under_a_key_and_so_the_same_everywhere():
    assert splitmix64(1234567, 0) == 6457827717110365317  # published test vector
    assert keyed(3, 7) == 6983089048290858884
    for seed, position in ((3, 7), (-5, 0), (2**70, 123456)):
        noise = keyed_gumbel(seed, position, 50).tolist()
        for index, value in enumerate(noise):
            uniform = ((splitmix64(keyed(seed, position), index) >> 12) + 0.5) * 2.0**-52
            assert value == pytest.approx(-math.log(-math.log(uniform)), rel=1e-12, abs=1e-12)


def test_noise_is_gumbel():
    """Mean, variance and 20 quantile bins of 200,000 values, within four standard errors."""
    noise = torch.cat([keyed_gumbel(0, position, 1000) for position in range(200)])
    assert abs(noise.mean() - 0.5772156649) < 4 * (math.pi**2 / 6 / 200_000) ** 0.5
    counts = torch.histc(torch.exp(-torch.exp(-noise)), 20, 0, 1) / 200_000
    assert (counts - 0.05).abs().max() < 4 * (0.05 * 0.95 / 200_000) ** 0.5
    pair = torch.stack([noise[:-1], noise[1:]])
    assert abs(torch.corrcoef(pair)[0, 1]) < 4 / 200_000**0.5


def test_drawing_noise_is_no_other_noise():
    """Not the target's, and not what the round before had at the same position."""
    rows = [Noise(1, 8).at(7), drawing_noise(1, 8, 5, 1.0).at(2), drawing_noise(1, 8, 6, 1.0).at(1)]
    assert len({tuple(row.tolist()) for row in rows}) == 3
    assert torch.equal(rows[1], drawing_noise(1, 8, 5, 0.3).at(2))


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
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_k": True}, "top_k is True"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": float("nan")}, "min_p is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
        ({"frequency_penalty": -3.0}, "frequency_penalty is -3"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias holds the id -1"),
        ({"logit_bias": {"1": 2.0}}, "logit_bias holds the id '1'"),
        ({"logit_bias": {1: 101.0}}, "logit_bias of id 1 is 101"),
        ({"logit_bias": ((1, 2.0), (1, 3.0))}, "twice"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens is 9 but max_new_tokens is 8"),
        ({"bad_words": (5,)}, "bad_words holds 5"),
        ({"bad_words": ((),)}, "bad_words holds"),
        ({"bad_words": ((1, -2),)}, "bad_words holds"),
        ({"verification": "greedy"}, "verification is 'greedy'; set it to one of coupled, rejection, typical"),
    ],
)
def test_bad_settings_say_what_to_set(settings, word):
    with pytest.raises(ValueError, match=word):
        SamplingParams(**settings)


def test_equal_requests_are_equal_and_hash_alike():
    one = SamplingParams(logit_bias={9: 1, 2: -1}, bad_words=[[3, 4]], stop=["x"])
    two = SamplingParams(logit_bias=((2, -1.0), (9, 1.0)), bad_words=((3, 4),), stop=("x",))
    assert one == two and hash(one) == hash(two)
    assert one.logit_bias == ((2, -1.0), (9, 1.0))


def test_ids_the_target_lacks_are_named():
    SamplingParams(logit_bias={9: 1.0}, bad_words=((3, 9),)).check_vocabulary(10)
    with pytest.raises(ValueError, match="logit_bias holds id 10 but the target has 10 ids"):
        SamplingParams(logit_bias={10: 1.0}).check_vocabulary(10)
    with pytest.raises(ValueError, match="bad_words holds id 12"):
        SamplingParams(bad_words=((3, 12),)).check_vocabulary(10)


def test_choose_leaves_the_logits_and_follows_masks():
    logits = torch.tensor([[0.0, 5.0, 1.0], [-float("inf"), 3.0, -float("inf")]], dtype=torch.float64)
    before = logits.clone()
    params = SamplingParams(temperature=1.0)
    assert all(choose(logits, [4, seed], params)[1] == 1 for seed in range(50))
    assert torch.equal(logits, before)
