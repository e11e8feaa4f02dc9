"""What the attention calls compute on the emulated chip.

Scores, softmax and sums are float32 whatever the inputs are. Paged calls go
through the cache in blocks of pages up to the longest request that is present,
with a running softmax, so that their cost grows with the tokens and not with
the width of the page table.
"""

import jax.numpy as jnp
from jax import lax

# Below every score; -inf would make a row that sees nothing a NaN.
MASKED = -1e30
BLOCK_TOKENS = 512


def read_pages(cache, pages):
    """Pages of a cache in float32; -1 reads as zeros, a page that is not there as NaN, which no result survives.

    Args:
        cache: [N, K, P, D].
        pages: [B, n] int32.

    Returns:
        [B, K, n*P, D] float32.
    """
    count, heads, size, dim = cache.shape
    batch, n = pages.shape
    read = cache[jnp.clip(pages, 0, count - 1)].astype(jnp.float32)
    fill = jnp.where(pages >= count, jnp.nan, 0.0)[:, :, None, None, None]
    read = jnp.where(((pages >= 0) & (pages < count))[:, :, None, None, None], read, fill)
    return read.transpose(0, 2, 1, 3, 4).reshape(batch, heads, n * size, dim)


def _running(carry, scores, values):
    """One block of a softmax that is taken block by block: (maximum, sum, weighted values) so far."""
    high, total, out = carry
    higher = jnp.maximum(high, scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - higher)
    shrink = jnp.exp(high - higher)
    block = jnp.einsum("bkrs,bksd->bkrd", weights, values, preferred_element_type=jnp.float32)
    return higher, total * shrink + weights.sum(-1, keepdims=True), out * shrink + block


def _paged(q, k_cache, v_cache, page_table, first, end, scores_of, sink):
    """Attention of grouped queries over blocks of pages.

    Args:
        q: [B, K, R, D] float32, R rows a key/value head.
        first, end: [] int32, positions between which there is something to see.
        scores_of: function of (scores [B, K, R, S], key positions [S]) that masks.
        sink: [K, R, 1] float32 or None.

    Returns:
        [B, K, R, Dv] float32.
    """
    batch, heads, rows, _ = q.shape
    size, width = k_cache.shape[2], page_table.shape[1]
    per_block = max(1, min(width, BLOCK_TOKENS // size))
    padding = -width % per_block
    table = jnp.pad(page_table, ((0, 0), (0, padding)), constant_values=-1)

    def body(block, carry):
        pages = lax.dynamic_slice_in_dim(table, block * per_block, per_block, axis=1)
        keys, values = read_pages(k_cache, pages), read_pages(v_cache, pages)
        scores = jnp.einsum("bkrd,bksd->bkrs", q, keys, preferred_element_type=jnp.float32)
        position = block * per_block * size + jnp.arange(per_block * size)
        return _running(carry, scores_of(scores, position), values)

    high = jnp.full((batch, heads, rows, 1), MASKED, jnp.float32)
    total = jnp.zeros_like(high)
    if sink is not None:  # a score that takes weight and brings no value
        high, total = jnp.broadcast_to(sink, high.shape), jnp.ones_like(high)
    start = (high, total, jnp.zeros((batch, heads, rows, v_cache.shape[3]), jnp.float32))
    blocks = (end + per_block * size - 1) // (per_block * size)
    _, total, out = lax.fori_loop(first // (per_block * size), blocks, body, start)
    return out / jnp.where(total > 0, total, 1.0)


def _grouped_sink(sink, kv_heads):
    """[K, G, 1] from a sink of [H, …], whose first column counts."""
    return sink[:, :1].astype(jnp.float32).reshape(kv_heads, -1, 1)


def paged_attention_decode(q, k_cache, v_cache, page_table, *rest, scale, is_causal, has_attention_mask,
                           has_cur_pos_tensor, has_attention_sink, sliding_window_size=None):  # fmt: skip
    """tt.paged_scaled_dot_product_attention_decode; shapes in kernels_replacements.tt_calls."""
    rest = list(rest)
    mask = rest.pop(0) if has_attention_mask else None
    positions = rest.pop(0) if has_cur_pos_tensor else None
    sink = rest.pop(0) if has_attention_sink else None
    _, batch, heads, dim = q.shape
    kv_heads, size = k_cache.shape[1:3]
    held = page_table.shape[1] * size
    grouped = q[0].astype(jnp.float32).reshape(batch, kv_heads, heads // kv_heads, dim) * scale
    seen_to = positions if positions is not None else jnp.full((batch,), held - 1, jnp.int32)

    def scores_of(scores, position):
        if mask is not None:
            columns = jnp.pad(mask[:, 0].astype(jnp.float32), ((0, 0), (0, 0), (0, BLOCK_TOKENS)))
            part = lax.dynamic_slice_in_dim(columns, position[0], position.shape[0], axis=2)
            scores = scores + part.reshape(batch, kv_heads, -1, position.shape[0])
        visible = position <= jnp.minimum(seen_to, held - 1)[:, None]
        if sliding_window_size is not None:
            visible &= position > (seen_to - sliding_window_size)[:, None]
        return jnp.where(visible[:, None, None, :], scores, MASKED)

    first = jnp.int32(0)
    if sliding_window_size is not None:
        live = jnp.where(seen_to >= 0, seen_to, jnp.iinfo(jnp.int32).max)
        first = jnp.clip(live.min() - sliding_window_size + 1, 0, held)
    end = jnp.minimum(seen_to.max() + 1, held)
    grouped_sink = None if sink is None else _grouped_sink(sink, kv_heads)[None]
    out = _paged(grouped, k_cache, v_cache, page_table, first, end, scores_of, grouped_sink)
    out = jnp.where((seen_to >= 0)[:, None, None, None], out, 0.0)
    return out.reshape(1, batch, heads, -1).astype(q.dtype)


def chunked_attention(q, k_cache, v_cache, page_table, start, *, scale):
    """tt.chunked_scaled_dot_product_attention."""
    _, heads, chunk, dim = q.shape
    kv_heads, size = k_cache.shape[1:3]
    group = heads // kv_heads
    rows = q.astype(jnp.float32).reshape(1, kv_heads, group * chunk, dim) * scale
    row_position = jnp.tile(start[0] + jnp.arange(chunk), group)

    def scores_of(scores, position):
        return jnp.where(position <= row_position[:, None], scores, MASKED)

    end = jnp.minimum(start[0] + chunk, page_table.shape[1] * size)
    out = _paged(rows, k_cache, v_cache, page_table, jnp.int32(0), end, scores_of, None)
    return out.reshape(1, heads, chunk, -1).astype(q.dtype)


def attention(q, k, v, *rest, scale, is_causal, has_attention_mask, has_attention_sink, sliding_window_size=None):
    """tt.scaled_dot_product_attention."""
    rest = list(rest)
    mask = rest.pop(0) if has_attention_mask else None
    sink = rest.pop(0) if has_attention_sink else None
    batch, heads, tokens, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    group = heads // kv_heads
    rows = q.astype(jnp.float32).reshape(batch, kv_heads, group * tokens, dim) * scale
    scores = jnp.einsum("bkrd,bksd->bkrs", rows, k.astype(jnp.float32))
    scores = scores.reshape(batch, heads, tokens, keys)
    if mask is not None:
        scores = scores + mask.astype(jnp.float32)
    row, column = jnp.arange(tokens)[:, None] + keys - tokens, jnp.arange(keys)
    if is_causal:
        scores = jnp.where(column <= row, scores, MASKED)
    if sliding_window_size is not None:
        near = (column > row - sliding_window_size) & (column < row + sliding_window_size)
        scores = jnp.where(near, scores, MASKED)
    high = scores.max(-1, keepdims=True)
    if sink is not None:
        by_head = sink[:, :1].astype(jnp.float32)[None, :, :, None]
        high = jnp.maximum(high, by_head)
    weights = jnp.exp(scores - high)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(by_head - high)
    weights = (weights / total).reshape(batch, kv_heads, group * tokens, keys)
    out = jnp.einsum("bkrs,bksd->bkrd", weights, v.astype(jnp.float32))
    return out.reshape(batch, heads, tokens, -1).astype(q.dtype)


def mla_decode(q, cache, page_table, positions, *, head_dim_v, scale, is_causal, **_present):
    """tt.paged_flash_mla_decode: the values are the first columns of the latents."""
    return paged_attention_decode(
        q, cache, cache[..., :head_dim_v], page_table, positions, scale=scale, is_causal=is_causal,
        has_attention_mask=False, has_cur_pos_tensor=True, has_attention_sink=False,
    )  # fmt: skip


def mla_prefill(q, latents, *, head_dim_v, scale, is_causal, **_present):
    """tt.flash_mla_prefill."""
    return attention(
        q, latents, latents[..., :head_dim_v], scale=scale, is_causal=is_causal,
        has_attention_mask=False, has_attention_sink=False,
    )  # fmt: skip
