"""Grouped matrix products against float64 and JAX's interpreted megablox kernels."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_replacements import moe as ours

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


def error(got, expected):
    """Largest difference relative to the largest value."""
    got, expected = np.asarray(got).astype(np.float64), np.asarray(expected).astype(np.float64)
    assert np.isfinite(got).all()
    return np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-9)


def random(*shapes, dtype=F32):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def by_group(lhs, rhs, sizes, first=0):
    """Float64: each row times the matrix of its group; rows of other groups are zeros."""
    out = np.zeros((len(lhs), rhs.shape[2]))
    ends = np.cumsum(sizes)
    for index, matrix in enumerate(rhs.astype(np.float64)):
        rows = slice(ends[first + index] - sizes[first + index], ends[first + index])
        out[rows] = lhs[rows].astype(np.float64) @ matrix
    return out


SIZES = {
    "even": [64, 64, 64, 64],
    "empty groups": [0, 100, 0, 156],
    "one group": [0, 0, 256, 0],
    "single rows": [1, 1, 253, 1],
}


@pytest.mark.parametrize("form", SIZES)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_gmm_against_the_original(form, dtype):
    """Within tolerance of float64, and at most twice the interpreted kernel's error."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm as original

    lhs, rhs = random((256, 128), (4, 128, 128), dtype=dtype)
    sizes = np.array(SIZES[form], np.int32)
    expected = by_group(lhs, rhs, sizes)
    out = ours.gmm(lhs, rhs, sizes)
    assert error(out, expected) < (2e-2 if dtype == BF16 else 1e-5)
    theirs = error(original(lhs, rhs, sizes, interpret=True), expected)
    assert error(out, expected) <= 2 * max(theirs, 1e-6)


def test_gmm_of_some_groups():
    """With an offset only the groups that are here are computed; existing rows stay."""
    lhs, rhs = random((96, 32), (2, 32, 48))
    sizes = np.array([10, 20, 30, 36], np.int32)
    out = ours.gmm(lhs, rhs, sizes, group_offset=np.int32(1))
    assert error(out, by_group(lhs, rhs, sizes, first=1)) < 1e-5
    existing = np.ones((96, 48), F32)
    kept = np.asarray(ours.gmm(lhs, rhs, sizes, group_offset=np.int32(1), existing_out=existing))
    assert (kept[:10] == 1).all() and (kept[60:] == 1).all() and error(kept[10:60], np.asarray(out)[10:60]) < 1e-6


@pytest.mark.parametrize("transposed", [False, True])
def test_gmm_gradients(transposed):
    """JAX's rule for gmm, over our gmm and tgmm, gives the gradients of a plain formula."""
    import jax
    import jax.numpy as jnp

    lhs, rhs, weight = random((96, 32), (3, 48, 32) if transposed else (3, 32, 48), (96, 48))
    sizes = np.array([40, 0, 56], np.int32)
    group = np.repeat(np.arange(3), sizes)
    grad_lhs = ours.gmm(weight, rhs, sizes, transpose_rhs=not transposed)
    grad_rhs = ours.tgmm(lhs.T, weight, sizes)
    grad_rhs = grad_rhs.swapaxes(1, 2) if transposed else grad_rhs

    def plain(lhs, rhs):
        matrices = rhs.swapaxes(1, 2) if transposed else rhs
        return (jnp.einsum("mk,mkn->mn", lhs, matrices[group]) * weight).sum()

    for mine, expected in zip((grad_lhs, grad_rhs), jax.grad(plain, argnums=(0, 1))(lhs, rhs), strict=True):
        assert error(mine, expected) < 1e-5


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 40), min_size=5, max_size=5))
def test_any_group_sizes(sizes):
    """Whatever the sizes are; rows past the last group are zeros."""
    lhs, rhs = random((200, 16), (5, 16, 8))
    sizes = np.array(sizes, np.int32)
    assert error(ours.gmm(lhs, rhs, sizes), by_group(lhs, rhs, sizes)) < 1e-5
