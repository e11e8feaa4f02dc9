"""A prompt's chunk under a sliding window: the pages that the window reaches, gathered, and dense attention over them.

TTNN's chunked attention has no window. What is read grows with the window and the chunk,
not with the prompt or the page table.
"""

import jax
import jax.numpy as jnp

from kernels_replacements import tt_calls

Array = jax.Array


def chunked_window_attention(
    q: Array, k_cache: Array, v_cache: Array, page_table: Array, start: Array, *, scale: float, sliding_window: int
) -> Array:
    """A chunk of one request attends, causally, to the last `sliding_window` positions, its own among them.

    Args:
        q: [1, H, S, D] float32 or bfloat16.
        k_cache, v_cache: [N, K, P, D], the chunk's keys and values already written.
        page_table: [1, W] int32.
        start: [1] int32, position of the chunk's first token.
        scale: of the scores.
        sliding_window: at least 1.

    Returns:
        [1, H, S, D] in q's dtype.

    Raises:
        KernelError: shapes or dtypes that TTNN's dense attention does not take.
    """
    chunk, page = q.shape[2], k_cache.shape[2]
    width = page_table.shape[1]
    # The window before the first token, the chunk, and one page more where they do not begin one.
    count = min(width, -(-(sliding_window - 1 + chunk) // page) + 1)
    first = jnp.clip((start[0] - sliding_window + 1) // page, 0, width - count)
    pages = jax.lax.dynamic_slice_in_dim(page_table[0], first, count)
    keys, values = (_rows(cache, pages) for cache in (k_cache, v_cache))
    seen = first * page + jnp.arange(count * page)
    asking = start[0] + jnp.arange(chunk)[:, None]
    visible = (seen <= asking) & (seen > asking - sliding_window)
    mask = jnp.where(visible, 0, jnp.finfo(q.dtype).min).astype(q.dtype)
    return tt_calls.attention(
        q, keys.astype(q.dtype), values.astype(q.dtype), mask=mask[None, None], scale=scale, is_causal=False
    )


def _rows(cache: Array, pages: Array) -> Array:
    """[1, K, count * P, D]: the pages one after the other; one that is not there is read as page 0, and masked."""
    taken = jnp.take(cache, jnp.maximum(pages, 0), axis=0)
    return taken.transpose(1, 0, 2, 3).reshape(1, cache.shape[1], -1, cache.shape[3])
