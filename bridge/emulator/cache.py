"""What the calls that write caches and state pools compute on the emulated chip.

Rows are written one after the other into the operand itself, so that the last
of two rows for one place wins, and a donated cache is never copied.
"""

import jax.numpy as jnp
from jax import lax


def write_rows(pool, starts, rows, valid):
    """pool with rows[i] written at starts[i] wherever valid[i].

    Args:
        pool: [s0, s1, …].
        starts: list of [n] int32, one for each dimension of the pool.
        rows: [n, …] with the pool's rank behind n.
        valid: [n] bool.
    """

    def body(i, pool):
        at = [start[i] for start in starts]
        row = lax.dynamic_index_in_dim(rows, i, keepdims=False)
        # What is there is written again where nothing may be: a write that is skipped costs a row, not a copy.
        kept = lax.dynamic_slice(pool, at, row.shape)
        return lax.dynamic_update_slice(pool, jnp.where(valid[i], row, kept), at)

    return lax.fori_loop(0, rows.shape[0], body, pool)


def paged_update_cache(cache, x, positions, page_table, *, share_cache):
    """tt.paged_update_cache."""
    pages, _, size, _ = cache.shape
    batch, width = page_table.shape
    row = jnp.clip(positions // size, 0, width - 1)
    page = jnp.take_along_axis(page_table, row[:, None], axis=1)[:, 0]
    valid = (positions >= 0) & (positions < width * size) & (page >= 0) & (page < pages)
    zero = jnp.zeros((batch,), jnp.int32)
    starts = [jnp.where(valid, page, 0), zero, jnp.where(valid, positions % size, 0), zero]
    return write_rows(cache, starts, x[0][:, None, :, None, :].astype(cache.dtype), valid)


def paged_fill_cache(cache, x, page_table, batch_index=None):
    """tt.paged_fill_cache."""
    pages, heads, size, dim = cache.shape
    row = jnp.int32(0) if batch_index is None else batch_index[0]
    table = lax.dynamic_index_in_dim(page_table, row, keepdims=False)
    length = x.shape[2]
    for first, count, rows in ((0, length // size, size), (length // size * size, 1, length % size)):
        if count * rows == 0:
            continue
        chunk = x[0, :, first : first + count * rows].reshape(heads, count, rows, dim).transpose(1, 0, 2, 3)
        page = lax.dynamic_slice_in_dim(table, first // size, count)
        valid = (page >= 0) & (page < pages)
        zero = jnp.zeros((count,), jnp.int32)
        cache = write_rows(cache, [jnp.where(valid, page, 0), zero, zero, zero], chunk[:, None].astype(cache.dtype), valid)
    return cache


def write_slots(pool, indices, rows):
    """pool with rows[i] in slot indices[i]; slot 0 is padding, and one that is not there is not written."""
    valid = (indices > 0) & (indices < pool.shape[0])
    zero = jnp.zeros_like(indices)
    starts = [jnp.where(valid, indices, 0)] + [zero] * (pool.ndim - 1)
    return write_rows(pool, starts, rows[:, None].astype(pool.dtype), valid)


def state_pool_update(state, indices, updates):
    """tt.state_pool_update."""
    return write_slots(state, indices, updates)
