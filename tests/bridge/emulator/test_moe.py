"""Mixture-of-experts calls against a loop over tokens and experts in float64."""

import ml_dtypes
import numpy as np
import pytest

from kernels_replacements import tt_calls

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)


def reference(x, weights, ids, w1, w3, w2):
    x, w1, w3, w2 = (a.astype(np.float64) for a in (x, w1, w3, w2))
    out = np.zeros(x.shape)
    for t in range(len(x)):
        for j, e in enumerate(ids[t]):
            if e >= 0:
                gate = x[t] @ w1[e]
                out[t] += weights[t, j] * ((gate / (1 + np.exp(-gate)) * (x[t] @ w3[e])) @ w2[e])
    return out


@pytest.mark.parametrize("tokens", (1, 4, 33))
def test_fused_moe(on_chip, tokens):
    """Each token gets its experts' weighted sum; negative ids are padding."""
    rng = np.random.default_rng(tokens)
    experts, channels, inner, k = 6, 64, 32, 2
    x = rng.standard_normal((tokens, channels)).astype(BF16)
    weights = rng.random((tokens, k)).astype(F32)
    ids = rng.integers(-1, experts, (tokens, k)).astype(np.int32)
    w1, w3 = ((rng.standard_normal((experts, channels, inner)) / 8).astype(BF16) for _ in range(2))
    w2 = (rng.standard_normal((experts, inner, channels)) / 6).astype(BF16)
    (got,) = on_chip(tt_calls.fused_moe_ep, x, weights, ids, w1, w3, w2)
    expected = reference(x, weights, ids, w1, w3, w2)
    assert np.abs(got.astype(np.float64) - expected).max() < 2e-2 * (np.abs(expected).max() + 1e-9)


def test_an_expert_that_is_not_there_gives_no_number(on_chip):
    """An id past the experts is NaN for its token, and the others are right."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 32)).astype(BF16)
    w1, w2 = rng.standard_normal((2, 32, 32)).astype(BF16), rng.standard_normal((2, 32, 32)).astype(BF16)
    ids = np.array([[5], [1]], np.int32)
    (got,) = on_chip(tt_calls.fused_moe_ep, x, np.ones((2, 1), F32), ids, w1, w1, w2)
    assert np.isnan(got[0].astype(F32)).all() and np.isfinite(got[1].astype(F32)).all()


def test_sparse_matmul(on_chip):
    """Marked experts are multiplied, the others are zeros."""
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 3, 4, 8)).astype(F32), rng.standard_normal((1, 5, 8, 6)).astype(F32)
    sparsity = (rng.random((2, 3, 1, 5)) < 0.5).astype(F32)
    (got,) = on_chip(tt_calls.sparse_matmul, a, b, sparsity)
    expected = np.einsum("xymk,ekn->xyemn", a.astype(np.float64), b[0].astype(np.float64))
    expected *= (sparsity[:, :, 0] != 0)[..., None, None]
    np.testing.assert_allclose(got[:, :, 0], expected, atol=1e-5)
