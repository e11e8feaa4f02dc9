"""Calls that write caches and pools write what they are told, and nothing else."""

import ml_dtypes
import numpy as np
import pytest

from kernels_replacements import tt_calls

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)


def table(*rows):
    return np.array([row + [-1] * (8 - len(row)) for row in rows], np.int32)


@pytest.mark.parametrize("dtype", (BF16, F32), ids=str)
@pytest.mark.parametrize("page", (32, 64, 128))
def test_update_writes_one_position_of_each_request(on_chip, page, dtype):
    """Positions at page boundaries land in the right page; everything else stays."""
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((6, 2, page, 64)).astype(dtype)
    x = rng.standard_normal((1, 3, 2, 64)).astype(dtype)
    positions = np.array([0, page - 1, page], np.int32)
    (got,) = on_chip(tt_calls.paged_update_cache, cache, x, positions, table([4, 2], [1, 3], [0, 5]))
    expected = cache.copy()
    expected[4, :, 0], expected[1, :, page - 1], expected[5, :, 0] = x[0]
    np.testing.assert_array_equal(got, expected)


def test_update_skips_and_last_wins(on_chip):
    """Position -1, a page of -1, one past the table and one past the cache write nothing; of two rows the last stays."""
    rng = np.random.default_rng(1)
    cache = rng.standard_normal((3, 1, 32, 64)).astype(F32)
    x = rng.standard_normal((1, 6, 1, 64)).astype(F32)
    positions = np.array([-1, 40, 8 * 32, 5, 7, 7], np.int32)
    pages = table([1], [1], [1, 2, 1, 2, 1, 2, 1, 2], [99], [2], [2])
    (got,) = on_chip(tt_calls.paged_update_cache, cache, x, positions, pages)
    expected = cache.copy()
    expected[2, :, 7] = x[0, 5]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("length", (1, 31, 32, 33, 96, 100))
def test_fill_writes_a_prompt(on_chip, length):
    """Whole pages and the beginning of the last one; a page of -1 is left out."""
    rng = np.random.default_rng(2)
    cache = rng.standard_normal((8, 2, 32, 64)).astype(F32)
    x = rng.standard_normal((1, 2, length, 64)).astype(F32)
    pages = table([1, 1, 1, 1], [5, -1, 7, 2])
    (got,) = on_chip(tt_calls.paged_fill_cache, cache, x, pages, np.array([1], np.int32))
    expected = cache.copy()
    for position in range(length):
        page = pages[1, position // 32]
        if page >= 0:
            expected[page, :, position % 32] = x[0, :, position]
    np.testing.assert_array_equal(got, expected)


def test_fill_takes_the_first_row_by_default(on_chip):
    """Without a batch index the prompt belongs to the table's first row."""
    cache = np.zeros((2, 1, 32, 64), F32)
    x = np.ones((1, 1, 2, 64), F32)
    (got,) = on_chip(tt_calls.paged_fill_cache, cache, x, table([1], [0]))
    assert got[1, 0, :2].all() and got.sum() == 2 * 64


@pytest.mark.parametrize("dtype", (BF16, F32), ids=str)
def test_pool_update(on_chip, dtype):
    """Slots are replaced as a whole; padding slot 0 and slots that are not there are not written."""
    rng = np.random.default_rng(3)
    pool = rng.standard_normal((5, 4, 3)).astype(dtype)
    rows = rng.standard_normal((5, 4, 3)).astype(dtype)
    (got,) = on_chip(tt_calls.state_pool_update, pool, np.array([3, 0, 1, 3, 9], np.int32), rows)
    expected = pool.copy()
    expected[1], expected[3] = rows[2], rows[3]
    np.testing.assert_array_equal(got, expected)


def test_a_donated_cache_is_written_in_place(on_chip):
    """A program that updates a donated cache needs no memory for a second one."""
    import chip
    import jax

    cache = jax.ShapeDtypeStruct((512, 4, 64, 128), np.float32)
    x, positions = jax.ShapeDtypeStruct((1, 4, 4, 128), np.float32), jax.ShapeDtypeStruct((4,), np.int32)
    pages = jax.ShapeDtypeStruct((4, 8), np.int32)
    lowered = jax.jit(tt_calls.paged_update_cache, donate_argnums=0).lower(cache, x, positions, pages)
    from bridge.compiler import pipeline

    program = str(lowered.compiler_ir("stablehlo")).encode()
    rewritten = pipeline.rewrite(chip.context(), program, "emulated", chip.VERSION)
    stats = chip.client().compile(rewritten.program).compiled_memory_stats()
    assert rewritten.donated == (0,)
    size = 512 * 4 * 64 * 128 * 4
    assert stats["alias_size_in_bytes"] == size
    assert stats["temp_size_in_bytes"] < size // 100
