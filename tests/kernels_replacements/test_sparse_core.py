"""Gathers, scatters and their weighted sums against numpy's own indexing."""

import ml_dtypes
import numpy as np
import pytest

from kernels_replacements import sparse_core as ours
from kernels_replacements.errors import KernelError

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((24, 16)).astype(F32)
INDICES = RNG.permutation(24).astype(np.int32)
WEIGHTS = RNG.random(24).astype(F32)


def test_dense_gather_reduce():
    """Groups of neighbours are summed; a weight of 0 hides a NaN where that is asked for."""
    weights = WEIGHTS.reshape(8, 3).copy()
    expected = (X[INDICES].astype(np.float64) * weights.reshape(-1, 1)).reshape(8, 3, 16).sum(1)
    np.testing.assert_allclose(ours.dense_gather_reduce(X, INDICES, weights, 3), expected, rtol=1e-5)
    broken = X.copy()
    broken[INDICES[4]] = np.nan
    weights[1, 1] = 0
    assert np.isfinite(np.asarray(ours.dense_gather_reduce(broken, INDICES, weights, 3, True))).all()


def test_ragged_gather_reduce():
    """Rows that are not valid count for nothing, whatever they hold."""
    valid = RNG.random(24) < 0.5
    x = X.copy()
    x[INDICES[~valid]] = np.nan
    expected = np.where(valid[:, None], X[INDICES].astype(np.float64) * WEIGHTS[:, None], 0).reshape(6, 4, 16).sum(1)
    out = np.asarray(ours.ragged_gather_reduce(x, INDICES, WEIGHTS, valid, 4))
    assert out.dtype == BF16
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=1e-2, atol=1e-2)


def test_ragged_gathers():
    """One form gathers a range of rows of the result, the other what comes from a range of the source."""
    start, end = np.array([5], np.int32), np.array([17], np.int32)
    rows = np.asarray(ours.ragged_gather_v2(X, INDICES, start, end))
    np.testing.assert_array_equal(rows[5:17], X[INDICES][5:17])
    rows = np.asarray(ours.ragged_scatter(X, INDICES, start, end))
    there = (INDICES >= 5) & (INDICES < 17)
    np.testing.assert_array_equal(rows[there], X[INDICES][there])


def test_slots_are_written_where_they_are():
    """Slots that are not there are skipped; other slots stay."""
    pool = X.copy()
    out = np.asarray(ours.pallas_scatter_slots(pool.copy(), np.array([3, -1, 99, 0], np.int32), X[:4] + 1))
    expected = pool.copy()
    expected[3], expected[0] = X[0] + 1, X[3] + 1
    np.testing.assert_array_equal(out, expected)


def test_blocks_are_copied_and_padding_is_not():
    """A pair of one block with itself, which pads the list, does not undo a copy to that block."""
    out = np.asarray(ours.copy_blocks(X.copy(), np.array([3, 5], np.int32), np.array([5, 5], np.int32)))
    expected = X.copy()
    expected[5] = X[3]
    np.testing.assert_array_equal(out, expected)


def test_values_of_another_type_are_an_error():
    """The message names the kernel and both types."""
    with pytest.raises(KernelError, match="pool is float32 and vals are bfloat16"):
        ours.pallas_scatter_slots(X, INDICES[:2], X[:2].astype(BF16))
