"""Attention over whole sequences: JAX's flash attention and splash attention, forward and backward.

TTNN's dense attention takes a forward pass that needs nothing kept for a backward one;
everything else is plain JAX in float32. Originals: jax 0.10.2, and the same functions in
vllm-torchtpu-core 0.29.0 and tpu-inference 0.32.0.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from kernels_replacements import tt_calls as tt
from kernels_replacements.errors import KernelError

Array = jax.Array

MASKED = -0.7 * float(jnp.finfo(jnp.dtype("float32")).max)  # what the originals add to a score that is not seen


def _require(condition: bool, kernel: str, message: str) -> None:
    if not condition:
        raise KernelError(f"{kernel}: {message}")


# ---- Flash attention


@functools.partial(jax.jit, static_argnames=("causal", "sm_scale", "block_sizes", "debug"))
def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    ab: Array | None = None,
    segment_ids: Any = None,
    *,
    causal: bool = False,
    sm_scale: float = 1.0,
    block_sizes: Any = None,
    debug: bool = False,
) -> Array:
    """Attention of [B, H, T, D] over [B, H, S, D], differentiable in q, k, v and ab.

    Args:
        ab: [B, H, T, S], added to the scores before they are scaled.
        segment_ids: (of queries [B, T], of keys [B, S]); only equal ones see each other.
        causal: row t sees columns up to t.

    Returns:
        [B, H, T, D] in q's dtype.
    """
    kernel = "flash_attention"
    batch, heads, tokens, dim = q.shape
    _require(k.shape == v.shape and k.shape[:2] == (batch, heads) and k.shape[3] == dim, kernel, f"q {q.shape}, k {k.shape} and v {v.shape} do not fit")  # fmt: skip
    scores = (batch, heads, tokens, k.shape[2])
    _require(ab is None or ab.shape == scores, kernel, f"ab must be {scores}")
    return _flash(q, k, v, ab, segment_ids, causal, sm_scale)


@functools.partial(jax.jit, static_argnames=("causal", "sm_scale", "block_sizes", "vmem_limit_bytes", "debug"))
def flash_attention_within_vmem(
    q: Array,
    k: Array,
    v: Array,
    ab: Array | None = None,
    segment_ids: Any = None,
    *,
    causal: bool = False,
    sm_scale: float = 1.0,
    block_sizes: Any = None,
    vmem_limit_bytes: int | None = None,
    debug: bool = False,
) -> Array:
    """`flash_attention` as vllm_torchtpu and tpu_inference have it, with a limit that is not needed here."""
    return flash_attention(q, k, v, ab, segment_ids, causal=causal, sm_scale=sm_scale)


@functools.partial(
    jax.jit, static_argnames=("causal", "sm_scale", "sliding_window", "block_sizes", "vmem_limit_bytes", "debug")
)
def encoder_only_flash_attention(
    q: Array,
    k: Array,
    v: Array,
    seq_lens: Array,
    *,
    causal: bool = False,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    block_sizes: Any = None,
    vmem_limit_bytes: int | None = None,
    debug: bool = False,
) -> Array:
    """Attention of padded sequences: [B, H, T, D] over the first `seq_lens` [B] columns of [B, H, S, D]."""
    tokens, columns = q.shape[2], k.shape[2]
    row, column = jnp.arange(tokens)[:, None], jnp.arange(columns)
    seen = jnp.broadcast_to(column < seq_lens[:, None, None], (q.shape[0], tokens, columns))
    if causal:
        seen &= column <= row
    if sliding_window is not None:
        seen &= (column > row - sliding_window) & (column < row + sliding_window)
    return _dense(q, k, v, None, seen[:, None], sm_scale)[0].astype(q.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _flash(q: Array, k: Array, v: Array, ab: Array | None, segment_ids: Any, causal: bool, scale: float) -> Array:
    square = q.shape[2] == k.shape[2]
    if q.shape[3] not in tt.HEAD_DIMS or q.dtype not in tt.FLOATS or (causal and not square):
        return _composed(q, k, v, ab, segment_ids, causal, scale)
    if ab is None and segment_ids is None:
        return tt.attention(q, k, v, is_causal=causal, scale=scale)
    seen = _seen(segment_ids, causal, q.shape[2], k.shape[2])
    mask = jnp.float32(0) if ab is None else ab.astype(jnp.float32) * scale
    mask = mask if seen is None else jnp.where(seen, mask, MASKED)
    return tt.attention(q, k, v, mask=mask.astype(q.dtype), is_causal=False, scale=scale)


def _seen(segment_ids: Any, causal: bool, tokens: int, columns: int) -> Array | None:
    """[1 or B, 1, T, S] bool, or None where everything is seen."""
    seen = None
    if segment_ids is not None:
        of_rows, of_columns = segment_ids
        seen = (of_rows[:, :, None] == of_columns[:, None, :])[:, None]
    if causal:
        below = (jnp.arange(tokens)[:, None] >= jnp.arange(columns))[None, None]
        seen = below if seen is None else seen & below
    return seen


def _dense(q, k, v, ab, seen, scale, soft_cap=None, sink=None):
    """Attention in float32 and the logarithm of its sums: ([B, H, T, D], [B, H, T])."""
    scores = jnp.einsum("bhtd,bhsd->bhts", q.astype(jnp.float32), k.astype(jnp.float32))
    if ab is not None:
        scores = scores + ab.astype(jnp.float32)
    scores = scores * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if seen is not None:
        scores = jnp.where(seen, scores, MASKED)
    high = scores.max(-1, keepdims=True)
    if sink is not None:
        sink = sink.astype(jnp.float32)[None, :, None, None]
        high = jnp.maximum(high, sink)
    weights = jnp.exp(scores - high)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - high)
    out = jnp.einsum("bhts,bhsd->bhtd", weights / total, v.astype(jnp.float32))
    return out, (jnp.log(total) + high)[..., 0]


def _composed(q, k, v, ab, segment_ids, causal, scale):
    return _dense(q, k, v, ab, _seen(segment_ids, causal, q.shape[2], k.shape[2]), scale)[0].astype(q.dtype)


def _flash_forward(q, k, v, ab, segment_ids, causal, scale):
    return _flash(q, k, v, ab, segment_ids, causal, scale), (q, k, v, ab, segment_ids)


def _flash_backward(causal, scale, kept, gradient):
    q, k, v, ab, segment_ids = kept
    _, backward = jax.vjp(lambda *inputs: _composed(*inputs, segment_ids, causal, scale), q, k, v, ab)
    return *backward(gradient), None


_flash.defvjp(_flash_forward, _flash_backward)


# ---- Splash attention: flash attention under a mask that is known in blocks


def _mask(
    info: Any, function: Any, tokens: int, columns: int, block: tuple[int, int], transposed: bool
) -> Array | None:
    """The dense mask [1 or H, T, S] that a MaskInfo stands for, or None if it hides nothing.

    Args:
        function: of (row ids, column ids), in place of stored blocks.
        block: rows and columns of a block.
        transposed: whether the info is that of the gradients of keys and values, whose
            `data_next` names blocks of rows and whose blocks are stored columns first.
    """
    if function is not None:
        return function(jnp.asarray(info.q_sequence)[:, None], jnp.arange(columns)[None])[None]
    if info.block_mask is None:
        return None
    kind, index = (jnp.asarray(x).astype(jnp.int32) for x in (info.block_mask, info.data_next))
    block_q, block_kv = block
    blocks = jnp.broadcast_to((kind == 2)[..., None, None], (*kind.shape, block_q, block_kv))
    if info.partial_mask_blocks is not None:
        stored = jnp.asarray(info.partial_mask_blocks)
        stored = stored.swapaxes(-1, -2) if transposed else stored
        blocks = jnp.where((kind == 1)[..., None, None], stored[jnp.asarray(info.mask_next).astype(jnp.int32)], blocks)
    heads, rows, columns_listed = kind.shape
    head = jnp.arange(heads)[:, None, None]
    dense = jnp.zeros((heads, tokens // block_q, columns // block_kv, block_q, block_kv), jnp.bool_)
    if transposed:
        dense = dense.at[head, index, jnp.arange(columns_listed)[None, None]].max(blocks)
    else:
        dense = dense.at[head, jnp.arange(rows)[None, :, None], index].max(blocks)
    return dense.transpose(0, 1, 3, 2, 4).reshape(heads, tokens, columns)


def _per_head(x: Array, heads: int, is_mqa: bool) -> Array:
    """Keys or values [1, H, S, D] from [S, D] or [K, S, D]."""
    x = x[None] if is_mqa else x
    return jnp.repeat(x, heads // x.shape[0], axis=0)[None]


def _visible(info, function, tokens, columns, segment_ids, block, transposed=False):
    """[1, 1 or H, T, S] bool or None."""
    mask = _mask(info, function, tokens, columns, block, transposed)
    if segment_ids is not None:
        same = (segment_ids[0][:, None] == segment_ids[1][None])[None]
        mask = same if mask is None else mask & same
    return None if mask is None else mask[None]


@jax.custom_batching.custom_vmap
def _masked(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Attention of a batch under a mask by one call; vmap, which is how splash attention takes a batch, adds to it."""
    return tt.attention(q, k, v, mask=mask, is_causal=False, scale=1.0)


@_masked.def_vmap
def _masked_batch(size: int, batched: list[bool], *arrays: Array) -> tuple[Array, bool]:
    full = [x if b else jnp.broadcast_to(x, (size, *x.shape)) for x, b in zip(arrays, batched, strict=True)]
    out = _masked(*(x.reshape(-1, *x.shape[2:]) for x in full))
    return out.reshape(size, -1, *out.shape[1:]), True


def splash_attention_forward(
    fwd_mask_info: Any,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Any,
    sinks: Array | None,
    mask_value: float,
    is_mqa: bool,
    block_sizes: Any,
    residual_checkpoint_name: str | None,
    save_residuals: bool,
    mask_function: Any,
    attn_logits_soft_cap: float | None = None,
    interpret: bool = False,
) -> Any:
    """Attention of [H, T, D] over [K, S, D], or [S, D] for one head, under the info's mask; scores are not scaled.

    Returns:
        [H, T, Dv] in q's dtype, and with save_residuals also ([H, T] float32 logarithms of the sums,).
    """
    heads, tokens, dim = q.shape
    columns = k.shape[0] if is_mqa else k.shape[1]
    block = (block_sizes.block_q, block_sizes.block_kv)
    seen = _visible(fwd_mask_info, mask_function, tokens, columns, segment_ids, block)
    plain = not save_residuals and attn_logits_soft_cap is None and sinks is None and k.shape == v.shape
    if plain and dim in tt.HEAD_DIMS and q.dtype == k.dtype and q.dtype in tt.FLOATS:
        keys, values = (x[None, None] if is_mqa else x[None] for x in (k, v))
        shape = (1, 1 if seen is None else seen.shape[1], tokens, columns)
        mask = jnp.where(True if seen is None else seen, jnp.zeros(shape, q.dtype), jnp.asarray(MASKED, q.dtype))
        out = _masked(q[None], keys, values, mask)[0]
    else:
        keys, values = _per_head(k, heads, is_mqa), _per_head(v, heads, is_mqa)
        out, sums = _dense(q[None], keys, values, None, seen, 1.0, attn_logits_soft_cap, sinks)
        out, sums = out[0].astype(q.dtype), sums[0]
    if residual_checkpoint_name is not None:
        out = jax.ad_checkpoint.checkpoint_name(out, name=residual_checkpoint_name)
        if save_residuals:
            sums = jax.ad_checkpoint.checkpoint_name(sums, name=residual_checkpoint_name)
    return (out, (sums,)) if save_residuals else out


def _gradients(q, k, v, seen, logsumexp, do, di, is_mqa, soft_cap):
    """Gradients of q [H, T, D], k and v in their shapes, all float32."""
    heads = q.shape[0]
    q, do = q.astype(jnp.float32), do.astype(jnp.float32)
    keys, values = (_per_head(x, heads, is_mqa)[0].astype(jnp.float32) for x in (k, v))
    scores = jnp.einsum("htd,hsd->hts", q, keys)
    slope = 1.0
    if soft_cap is not None:
        bent = jnp.tanh(scores / soft_cap)
        scores, slope = soft_cap * bent, 1.0 - bent * bent
    if seen is not None:
        scores = jnp.where(seen[0], scores, MASKED)
    weights = jnp.exp(scores - logsumexp[..., None])
    d_scores = (jnp.einsum("htd,hsd->hts", do, values) - di[..., None]) * weights * slope
    dq = jnp.einsum("hts,hsd->htd", d_scores, keys)
    dk, dv = jnp.einsum("hts,htd->hsd", d_scores, q), jnp.einsum("hts,htd->hsd", weights, do)
    return dq, _summed(dk, k, is_mqa), _summed(dv, v, is_mqa)


def _summed(gradient: Array, x: Array, is_mqa: bool) -> Array:
    """The gradient of what `_per_head` repeated."""
    kv_heads = 1 if is_mqa else x.shape[0]
    return gradient.reshape(kv_heads, -1, *gradient.shape[1:]).sum(1).reshape(x.shape)


def splash_attention_bwd_dq(
    q: Array, k: Array, v: Array, segment_ids: Any, sinks: Array | None, logsumexp: Array, do: Array, di: Array, *,
    bq: int, bkv: int, is_mqa: bool, mask_info: Any, mask_value: float, attn_logits_soft_cap: float | None,
    q_layout: Any, k_layout: Any, v_layout: Any, mask_function: Any, interpret: bool,
) -> Array:  # fmt: skip
    """The gradient of q [H, T, D]; logsumexp and di [H, T] float32."""
    columns = k.shape[0] if is_mqa else k.shape[1]
    seen = _visible(mask_info, mask_function, q.shape[1], columns, segment_ids, (bq, bkv))
    return _gradients(q, k, v, seen, logsumexp, do, di, is_mqa, attn_logits_soft_cap)[0].astype(q.dtype)


def splash_attention_bwd_dkv(
    q: Array, k: Array, v: Array, segment_ids: Any, sinks: Array | None, logsumexp: Array, do: Array, di: Array, *,
    bq: int, bkv: int, bkv_compute: int, is_mqa: bool, mask_info: Any, mask_value: float,
    attn_logits_soft_cap: float | None, use_fused_bwd_kernel: bool, q_layout: Any, k_layout: Any, v_layout: Any,
    mask_function: Any, interpret: bool,
) -> tuple[Array | None, Array, Array]:  # fmt: skip
    """The gradients of q (None unless it is fused), k and v; logsumexp and di [H, T] float32."""
    columns = k.shape[0] if is_mqa else k.shape[1]
    seen = _visible(mask_info, mask_function, q.shape[1], columns, segment_ids, (bq, bkv), transposed=True)
    dq, dk, dv = _gradients(q, k, v, seen, logsumexp, do, di, is_mqa, attn_logits_soft_cap)
    return dq.astype(q.dtype) if use_fused_bwd_kernel else None, dk.astype(k.dtype), dv.astype(v.dtype)
