"""Dropout of the replacement for flash attention: the same mask forward and backward, of the right density.

What the replacement computes on the chip is tested in tests/bridge/torch_tpu; its dropout is
plain torch and tested here, on the CPU.
"""

import pytest
import torch

from kernels_replacements import flash_attention

SHAPES = {"plain": ((2, 4, 16, 8), (2, 4, 24, 8)), "grouped": ((2, 4, 16, 8), (2, 2, 24, 8))}


def run(shapes, causal=False, bias=None, dropout=0.25, seed=0):
    torch.manual_seed(seed)
    query, key, value = (torch.randn(shape, requires_grad=True) for shape in (shapes[0], shapes[1], shapes[1]))
    with torch.no_grad():
        out, _, _, _, _, _, mask_seed, *_ = flash_attention._forward(query, key, value, bias, True, dropout, causal)
    return query, key, value, out, mask_seed


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("form", SHAPES)
def test_gradients_are_those_of_the_masked_product(form, masked, causal):
    """With the mask that the seed stands for, autograd gives the same output and gradients."""
    bias = torch.randn(16, 24) if masked else None
    query, key, value, out, seed = run(SHAPES[form], causal, bias)
    group = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = query @ keys.mT * 8**-0.5 + (0 if bias is None else bias)
    if causal:
        scores = scores.masked_fill(~torch.ones(16, 24, dtype=torch.bool).tril(), float("-inf"))
    expected = (scores.softmax(-1) * flash_attention._kept(seed, scores.shape, 0.25, query)) @ values
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    with torch.no_grad():
        ours = flash_attention._backward(
            gradient, query, key, value, out, None, seed, seed, bias, None, None, 16, 24, 0.25, causal
        )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for mine, tensor in zip(ours, (query, key, value), strict=True):
        torch.testing.assert_close(mine, tensor.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_the_mask_drops_the_asked_share(dropout):
    """Over 100,000 elements the share dropped is within five standard deviations, along every axis."""
    kept = flash_attention._kept(torch.tensor(12345), (100, 10, 100), dropout, torch.zeros(0)) > 0
    for axes, count in (((0, 1, 2), 100_000), ((1, 2), 1_000), ((0, 1), 1_000)):
        share = (~kept).double().mean(axes)
        assert (share - dropout).abs().max() < 5 * (dropout * (1 - dropout) / count) ** 0.5


def test_seeds_repeat_and_differ():
    """The same generator state gives the same result, another state another one."""
    first, again, other = (run(SHAPES["plain"], seed=seed)[3] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_row_that_sees_nothing_is_zero():
    """A fully masked row gives zeros, as torch's own attention does, and no NaN."""
    bias = torch.zeros(16, 24)
    bias[3] = float("-inf")
    *_, out, _ = run(SHAPES["plain"], bias=bias)
    assert torch.isfinite(out).all() and (out[:, :, 3] == 0).all()
