"""Attention over paged caches: JAX's own kernels, and those of vllm_torchtpu, tpu_inference and sgl_jax.

Each function has its original's parameters; tuning ones (block sizes, VMEM limits) are
taken and not needed. Originals: jax 0.10.2, vllm-torchtpu-core 0.29.0, tpu-inference 0.32.0.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from kernels_replacements import tt_calls as tt
from kernels_replacements.errors import KernelError
from kernels_replacements.ragged_attention import SIDE_BY_SIDE, ApartPages, Batch, Pages, Rules, attend, composed

Array = jax.Array

DEFAULT_MASK_VALUE = -0.7 * float(jnp.finfo(jnp.dtype("float32")).max)
INT8_STEPS = 127.5  # of JAX's quantized pages: value = int8 * scale / 127.5


def _require(condition: bool, kernel: str, message: str) -> None:
    if not condition:
        raise KernelError(f"{kernel}: {message}")


# ---- jax.experimental.pallas.ops.tpu.paged_attention


@functools.partial(
    jax.jit,
    static_argnames=("mask_value", "attn_logits_soft_cap", "pages_per_compute_block", "megacore_mode", "inline_seq_dim"),
)
def paged_attention(
    q: Array,
    k_pages: Any,
    v_pages: Any,
    lengths: Array,
    page_indices: Array,
    *,
    mask_value: float = DEFAULT_MASK_VALUE,
    attn_logits_soft_cap: float | None = None,
    pages_per_compute_block: int,
    megacore_mode: str | None = None,
    inline_seq_dim: bool = True,
) -> Array:
    """One token of each request attends to its first `lengths` cached positions; scores are not scaled.

    Heads come before pages here, so that each head's pages are a cache of one head: a
    request of K heads becomes K requests, and nothing is laid out anew.

    Args:
        q: [B, H, D].
        k_pages, v_pages: [K, N, P, D], or (int8 [K, N, P, D], scales [K, N, P, 1]).
        lengths: [B] int32.
        page_indices: [B, W] int32.

    Returns:
        [B, H, D] in q's dtype; zeros for a request of length 0.
    """
    keys, values = _dequantized(k_pages, q.dtype), _dequantized(v_pages, q.dtype)
    batch, heads, dim = q.shape
    kv_heads, count, size, key_dim = keys.shape
    kernel = "paged_attention"
    _require(keys.shape == values.shape, kernel, f"k_pages {keys.shape} and v_pages {values.shape} differ")
    _require(heads % kv_heads == 0 and key_dim == dim, kernel, f"q {q.shape} does not fit pages of {keys.shape}")
    _require(lengths.shape == (batch,) and page_indices.shape[0] == batch, kernel, f"lengths {lengths.shape} and page_indices {page_indices.shape} do not fit {batch} requests")  # fmt: skip
    rows = q.reshape(batch * kv_heads, heads // kv_heads, dim)
    k_cache, v_cache = keys.reshape(-1, 1, size, dim), values.reshape(-1, 1, size, dim)
    table = page_indices[:, None] + jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None] * count
    table = jnp.where(page_indices[:, None] >= 0, table, -1).reshape(batch * kv_heads, -1)
    positions = jnp.repeat(lengths - 1, kv_heads)
    callable_by_tt = size in tt.PAGE_SIZES and dim in tt.HEAD_DIMS and keys.dtype in tt.FLOATS and q.dtype in tt.FLOATS
    if attn_logits_soft_cap is None and callable_by_tt:
        table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % tt.TABLE_MULTIPLE)), constant_values=-1)
        out = tt.paged_attention_decode(rows[None], k_cache, v_cache, table, positions, scale=1.0)[0]
        return out.reshape(q.shape)
    starts = jnp.arange(rows.shape[0] + 1, dtype=jnp.int32)
    requests = Batch(positions + 1, table, starts, jnp.int32(rows.shape[0]))
    rules = Rules(1.0, soft_cap=attn_logits_soft_cap)
    return composed(rows, ApartPages(k_cache, v_cache), requests, rules).astype(q.dtype).reshape(q.shape)


def _dequantized(pages: Any, dtype: Any) -> Array:
    if isinstance(pages, tuple):
        weight, scales = pages
        return (weight.astype(jnp.float32) * scales.astype(jnp.float32) / INT8_STEPS).astype(dtype)
    return pages


# ---- jax.experimental.pallas.ops.tpu.ragged_paged_attention, and v2 of tpu_inference and sgl_jax


@functools.partial(
    jax.jit,
    static_argnames=(
        "sm_scale", "sliding_window", "soft_cap", "mask_value", "k_scale", "v_scale", "num_kv_pages_per_block",
        "num_queries_per_block", "vmem_limit_bytes",
    ),
)  # fmt: skip
def ragged_paged_attention(
    q: Array,
    kv_pages: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = DEFAULT_MASK_VALUE,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> Array:
    """Tokens of several sequences attend, causally, to their sequences' pages.

    Args:
        q: [T, H, D].
        kv_pages: [N, P, 2K, D], keys and values of a head in neighbouring rows.
        kv_lens: [S] int32, the new tokens included.
        page_indices: [S, W] int32.
        cu_q_lens: [S+1] int32.
        num_seqs: [1] int32.

    Returns:
        [T, H, D] in q's dtype; zeros for tokens of no sequence.
    """
    kernel = "ragged_paged_attention"
    _, _, rows, dim = kv_pages.shape
    _require(rows % 2 == 0 and q.shape[2] == dim, kernel, f"q {q.shape} does not fit pages of {kv_pages.shape}")
    _require(q.shape[1] % (rows // 2) == 0, kernel, f"{q.shape[1]} query heads are no multiple of {rows // 2}")
    _check_batch(kernel, kv_lens, page_indices, cu_q_lens)
    rules = Rules(sm_scale * (k_scale or 1.0), sliding_window, soft_cap, value_scale=v_scale or 1.0)
    batch = Batch(kv_lens, page_indices, cu_q_lens, num_seqs[0])
    return attend(q, Pages(kv_pages, rows // 2, dim), batch, rules).astype(q.dtype)


def _check_batch(kernel: str, kv_lens: Array, page_indices: Array, cu_q_lens: Array) -> None:
    sequences = kv_lens.shape[0]
    _require(cu_q_lens.shape == (sequences + 1,), kernel, f"cu_q_lens {cu_q_lens.shape} does not fit {sequences} sequences")  # fmt: skip
    _require(page_indices.shape[0] % sequences == 0, kernel, f"page_indices {page_indices.shape} does not fit {sequences} sequences")  # fmt: skip
    for name, array in (("kv_lens", kv_lens), ("page_indices", page_indices), ("cu_q_lens", cu_q_lens)):
        _require(array.dtype == jnp.int32, kernel, f"{name} is {array.dtype.name}; int32 is needed")
