"""The sampling call draws from what top k and top p leave, in the right proportions."""

import functools

import numpy as np

from kernels_replacements import tt_calls


def draw(on_chip, values, k, p, temperature, seed=0):
    batch, count = values.shape
    indices = np.tile(np.arange(count, dtype=np.int32) * 10, (batch, 1))
    full = [np.full(batch, x, t) for x, t in ((k, np.int32), (p, np.float32), (temperature, np.float32))]
    (tokens,) = on_chip(functools.partial(tt_calls.sampling, seed=seed), values.astype(np.float32), indices, *full)
    return tokens // 10


def test_k_of_one_is_argmax(on_chip):
    """k = 1 gives the largest value's token, the first of equal ones, at any temperature."""
    values = np.random.default_rng(0).standard_normal((16, 40)).astype(np.float32)
    values[3, 7] = values[3, 30] = 9.0
    np.testing.assert_array_equal(draw(on_chip, values, 1, 1.0, 5.0), values.argmax(1))


def test_frequencies_follow_the_softmax(on_chip):
    """With nothing cut off, 20,000 draws follow the probabilities at the temperature."""
    logits = np.array([2.0, 1.0, 0.0, -1.0])
    drawn = draw(on_chip, np.tile(logits, (20000, 1)), 4, 1.0, 0.7)
    expected = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    assert np.abs(np.bincount(drawn, minlength=4) / 20000 - expected).max() < 0.015


def test_top_k_and_top_p_cut(on_chip):
    """Only the k best are drawn, and of them only those that reach p together."""
    logits = np.log(np.array([0.1, 0.4, 0.3, 0.2]))
    assert set(draw(on_chip, np.tile(logits, (2000, 1)), 2, 1.0, 1.0)) == {1, 2}
    assert set(draw(on_chip, np.tile(logits, (2000, 1)), 4, 0.65, 1.0)) == {1, 2}
    assert set(draw(on_chip, np.tile(logits, (2000, 1)), 4, 0.01, 1.0)) == {1}


def test_the_seed_decides(on_chip):
    """One seed gives one result; another gives another."""
    values = np.zeros((64, 32))
    first, again, other = (draw(on_chip, values, 32, 1.0, 1.0, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
