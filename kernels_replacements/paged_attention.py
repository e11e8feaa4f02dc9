"""Attention over paged caches: JAX's own kernels, and those of vllm_torchtpu, tpu_inference and sgl_jax.

Each function has its original's parameters; tuning ones (block sizes, VMEM limits) are
taken and not needed. Originals: jax 0.10.2, vllm-torchtpu-core 0.29.0, tpu-inference 0.32.0.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kernels_replacements import tt_calls as tt
from kernels_replacements.errors import KernelError
from kernels_replacements.ragged_attention import INTERLEAVED, SIDE_BY_SIDE, ApartPages, Batch, Pages, Rules, attend, composed

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


# ---- v3 of vllm_torchtpu, tpu_inference and sgl_jax: writes the new keys and values, then attends


@dataclass(frozen=True)
class _Scales:
    """Factors of quantized queries, keys and values; None where they are not."""

    q: float | None
    k: float | None
    v: float | None

    def quantized(self, q: Array, dtype: Any) -> Array:
        """Queries as the original's matrix unit gets them."""
        if self.q is None:
            return q
        info = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
        return jnp.clip(q / self.q, float(info.min), float(info.max)).astype(dtype)

    def of_scores(self, scale: float) -> float:
        return scale * (1.0 if self.k is None else self.k) * (1.0 if self.q is None else self.q)


def _attend_and_update(
    kernel: str, q: Array, keys: Array, values: Array, kv_cache: Array, batch: Batch, rules: Rules, scales: _Scales,
    *, side_by_side: bool, update: bool, sink: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """The new positions written into the cache in place, and what the tokens then attend to.

    Args:
        q: [T, H, D]; keys, values: [T, K, D].
        kv_cache: [N, P, R/pk, pk, L], rows of L lanes packed into words of 32 bits.

    Returns:
        (out [T, H, D] float32, the cache).
    """
    count, size, packed, packing, lanes = kv_cache.shape
    total, kv_heads, dim = keys.shape
    rows = packed * packing
    needed = kv_heads if side_by_side else 2 * kv_heads
    _require(keys.shape == values.shape and q.shape[0] == total and q.shape[2] == dim, kernel, f"queries {q.shape}, keys {keys.shape} and values {values.shape} do not fit")  # fmt: skip
    _require(q.shape[1] % kv_heads == 0, kernel, f"{q.shape[1]} query heads are no multiple of {kv_heads}")
    _require(rows >= needed and lanes >= (2 * dim if side_by_side else dim), kernel, f"a cache of {kv_cache.shape} does not hold {kv_heads} heads of {dim}")  # fmt: skip
    if update:
        stacked = jnp.concatenate([keys, values], -1) if side_by_side else jnp.stack([keys, values], 2)
        new = stacked.reshape(total, needed, -1).astype(kv_cache.dtype)
        new = jnp.pad(new, ((0, 0), (0, rows - needed), (0, lanes - new.shape[2])))
        sequence, position, there = batch.tokens(total)
        page = batch.page_table[sequence, jnp.clip(position // size, 0, batch.page_table.shape[1] - 1)]
        there &= (page >= 0) & (page < count) & (position < batch.page_table.shape[1] * size)
        slot = jnp.where(there, page * size + position % size, count * size)
        flat = kv_cache.reshape(count * size, packed, packing, lanes)
        kv_cache = flat.at[slot].set(new.reshape(total, packed, packing, lanes), mode="drop").reshape(kv_cache.shape)
    pages = Pages(kv_cache.reshape(count, size, rows, lanes), kv_heads, dim, SIDE_BY_SIDE if side_by_side else INTERLEAVED)  # fmt: skip
    return attend(scales.quantized(q, kv_cache.dtype), pages, batch, rules, sink), kv_cache


def _batch(kernel: str, kv_lens: Array, page_indices: Array, cu_q_lens: Array, distribution: Array) -> Batch:
    _check_batch(kernel, kv_lens, page_indices, cu_q_lens)
    _require(distribution.shape == (3,), kernel, f"distribution {distribution.shape} must be (3,)")
    return Batch(kv_lens, page_indices.reshape(kv_lens.shape[0], -1), cu_q_lens, distribution[2])


_V3_STATIC = (
    "use_causal_mask", "skip_kv_mask", "skip_kv_update", "sm_scale", "sliding_window", "soft_cap", "out_dtype",
    "mask_value", "q_scale", "k_scale", "v_scale", "chunk_prefill_size", "d_block_sizes", "p_block_sizes",
    "m_block_sizes", "vmem_limit_bytes", "debug_mode", "disable_bounds_checks", "disable_semaphore_checks",
)  # fmt: skip


@functools.partial(jax.jit, static_argnames=_V3_STATIC, donate_argnames=("kv_cache",))
def ragged_paged_attention_v3(
    queries: Array, keys: Array, values: Array, kv_cache: Array, kv_lens: Array, page_indices: Array,
    cu_q_lens: Array, distribution: Array, *, use_causal_mask: bool = True, skip_kv_mask: bool = False,
    skip_kv_update: bool = False, sm_scale: float = 1.0, sliding_window: int | None = None,
    soft_cap: float | None = None, out_dtype: Any = None, mask_value: float | None = None,
    q_scale: float | None = None, k_scale: float | None = None, v_scale: float | None = None,
    chunk_prefill_size: int | None = None, d_block_sizes: Any = None, p_block_sizes: Any = None,
    m_block_sizes: Any = None, vmem_limit_bytes: int | None = None, debug_mode: bool = False,
    disable_bounds_checks: bool = True, disable_semaphore_checks: bool = True,
) -> tuple[Array, Array]:  # fmt: skip
    """Tokens of several sequences write their keys and values and attend to their sequences' pages.

    Args:
        queries: [T, H, D]; keys, values: [T, K, D].
        kv_cache: [N, P, ceil(2K/pk), pk, L], K0 V0 K1 V1 … a token; L is D rounded up to 128.
            Where it holds only K rows of 128 lanes and D is 128, it is the cache of a head
            dimension of 64 (`ragged_paged_attention_hd64`) under queries padded to 128,
            as vllm_torchtpu 0.29.0 makes it.
        kv_lens: [S] int32, new tokens included; page_indices: [S*W] int32; cu_q_lens: [S+1] int32.
        distribution: [3] int32, the last is the number of sequences.

    Returns:
        (out [T, H, D], the cache); zeros for tokens of no sequence.
    """
    kernel = "ragged_paged_attention (v3)"
    batch = _batch(kernel, kv_lens, page_indices, cu_q_lens, distribution)
    scales, window = _Scales(q_scale, k_scale, v_scale), sliding_window if use_causal_mask else None
    rules = Rules(scales.of_scores(sm_scale), window, soft_cap, use_causal_mask, 1.0 if v_scale is None else v_scale)
    dim, kv_heads, rows = queries.shape[2], keys.shape[1], kv_cache.shape[2] * kv_cache.shape[3]
    dtype = out_dtype or (jnp.float32 if queries.dtype == jnp.float32 else jnp.bfloat16)
    halves = rows < 2 * kv_heads and dim == kv_cache.shape[4] == 128
    if halves:
        queries, keys, values = (x[..., :64] for x in (queries, keys, values))
    out, kv_cache = _attend_and_update(
        kernel, queries, keys, values, kv_cache, batch, rules, scales, side_by_side=halves, update=not skip_kv_update
    )
    return jnp.pad(out, ((0, 0), (0, 0), (0, dim - out.shape[2]))).astype(dtype), kv_cache


@functools.partial(
    jax.jit, static_argnames=(*(n for n in _V3_STATIC if n != "skip_kv_update"), "update_kv_cache"), donate_argnames=("kv_cache",)
)
def ragged_paged_attention_v3_inference(
    queries: Array, keys: Array, values: Array, kv_cache: Array, kv_lens: Array, page_indices: Array,
    cu_q_lens: Array, distribution: Array, *, use_causal_mask: bool = True, update_kv_cache: bool = True,
    skip_kv_mask: bool = False, sm_scale: float = 1.0, sliding_window: int | None = None,
    soft_cap: float | None = None, out_dtype: Any = None, mask_value: float | None = None,
    q_scale: float | None = None, k_scale: float | None = None, v_scale: float | None = None,
    chunk_prefill_size: int | None = None, d_block_sizes: Any = None, p_block_sizes: Any = None,
    m_block_sizes: Any = None, vmem_limit_bytes: int | None = None, debug_mode: bool = False,
    disable_bounds_checks: bool = True, disable_semaphore_checks: bool = True,
) -> tuple[Array, Array]:  # fmt: skip
    """`ragged_paged_attention_v3` as tpu_inference has it, with the update's switch the other way round."""
    return ragged_paged_attention_v3(
        queries, keys, values, kv_cache, kv_lens, page_indices, cu_q_lens, distribution,
        use_causal_mask=use_causal_mask, skip_kv_update=not update_kv_cache, sm_scale=sm_scale,
        sliding_window=sliding_window, soft_cap=soft_cap, out_dtype=out_dtype, q_scale=q_scale, k_scale=k_scale,
        v_scale=v_scale,
    )  # fmt: skip


_HD64_STATIC = (
    "sm_scale", "sliding_window", "strict_sliding_window", "soft_cap", "mask_value", "q_scale", "k_scale", "v_scale",
    "chunk_prefill_size", "num_kv_pages_per_block", "num_queries_per_block", "vmem_limit_bytes", "debug_mode",
    "skip_kv_update", "use_causal_mask",
)  # fmt: skip


@functools.partial(jax.jit, static_argnames=_HD64_STATIC, donate_argnames=("kv_cache",))
def ragged_paged_attention_hd64(
    queries: Array, keys: Array, values: Array, kv_cache: Array, kv_lens: Array, page_indices: Array,
    cu_q_lens: Array, distribution: Array, attention_sink: Array | None = None, *, sm_scale: float = 1.0,
    sliding_window: int | None = None, strict_sliding_window: bool = True, soft_cap: float | None = None,
    mask_value: float = DEFAULT_MASK_VALUE, q_scale: float | None = None, k_scale: float | None = None,
    v_scale: float | None = None, chunk_prefill_size: int | None = None, num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None, vmem_limit_bytes: int | None = None, debug_mode: bool = False,
    skip_kv_update: bool = False, use_causal_mask: bool = True,
) -> tuple[Array, Array]:  # fmt: skip
    """`ragged_paged_attention_v3` for a head dimension of 64, with sinks.

    Args:
        kv_cache: [N, P, ceil(K/pk), pk, 128], a head's keys in 64 lanes and its values in the next.
        attention_sink: [H] float32 or None.
    """
    kernel = "ragged_paged_attention_hd64"
    batch = _batch(kernel, kv_lens, page_indices, cu_q_lens, distribution)
    scales = _Scales(q_scale, k_scale, v_scale)
    rules = Rules(
        scales.of_scores(sm_scale), sliding_window, soft_cap, use_causal_mask, 1.0 if v_scale is None else v_scale
    )
    out, kv_cache = _attend_and_update(
        kernel, queries, keys, values, kv_cache, batch, rules, scales, side_by_side=True, update=not skip_kv_update,
        sink=attention_sink,
    )  # fmt: skip
    return out.astype(queries.dtype), kv_cache


@functools.partial(
    jax.jit,
    static_argnames=tuple(n for n in _HD64_STATIC if n not in ("strict_sliding_window", "skip_kv_update", "use_causal_mask")),  # fmt: skip
    donate_argnames=("kv_cache",),
)
def ragged_paged_attention_hd64_inference(
    queries: Array, keys: Array, values: Array, kv_cache: Array, kv_lens: Array, page_indices: Array,
    cu_q_lens: Array, distribution: Array, attention_sink: Array | None = None, *, sm_scale: float = 1.0,
    sliding_window: int | None = None, soft_cap: float | None = None, mask_value: float | None = DEFAULT_MASK_VALUE,
    q_scale: float | None = None, k_scale: float | None = None, v_scale: float | None = None,
    chunk_prefill_size: int | None = None, num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None, vmem_limit_bytes: int | None = None, debug_mode: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """`ragged_paged_attention_hd64` as tpu_inference has it."""
    return ragged_paged_attention_hd64(
        queries, keys, values, kv_cache, kv_lens, page_indices, cu_q_lens, distribution, attention_sink,
        sm_scale=sm_scale, sliding_window=sliding_window, soft_cap=soft_cap, q_scale=q_scale, k_scale=k_scale,
        v_scale=v_scale,
    )  # fmt: skip


# ---- Writing slices of new keys and values


def _write_slices(new_kv: Array, slices: Array, kv_cache: Array, num_slices: Array, page_size: int) -> Array:
    """kv_cache [N*P, R, D] with rows of new_kv [T, R, D] at `slices` [3, n]: where in the cache, where in new_kv, how many."""
    kernel = "kv_cache_update"
    _require(new_kv.shape[1:] == kv_cache.shape[1:], kernel, f"new_kv {new_kv.shape} does not fit a cache of {kv_cache.shape}")  # fmt: skip
    _require(new_kv.dtype == kv_cache.dtype, kernel, f"new_kv is {new_kv.dtype.name} and the cache {kv_cache.dtype.name}")  # fmt: skip
    row = jnp.arange(page_size)[None]
    there = (row < slices[2][:, None]) & (jnp.arange(slices.shape[1]) < num_slices[0])[:, None]
    token = jnp.where(there, slices[1][:, None] + row, new_kv.shape[0]).reshape(-1)
    place = jnp.where(there, slices[0][:, None] + row, kv_cache.shape[0]).reshape(-1)
    of_token = jnp.full((new_kv.shape[0],), kv_cache.shape[0], jnp.int32).at[token].set(place, mode="drop")
    return kv_cache.at[of_token].set(new_kv, mode="drop")


_UPDATE_STATIC = ("page_size", "num_slices_per_block", "mesh", "kv_cache_pspec", "dynamic_validate_inputs", "vmem_limit_bytes")  # fmt: skip


@functools.partial(jax.jit, static_argnames=_UPDATE_STATIC, donate_argnames=("kv_cache",))
def kv_cache_update(
    new_kv: Array, slices: Array, kv_cache: Array, num_slices: Array, *, page_size: int = 32,
    num_slices_per_block: int | None = None, mesh: Any = None, kv_cache_pspec: Any = None,
    dynamic_validate_inputs: bool = False, vmem_limit_bytes: int = 40 << 20,
) -> Array:  # fmt: skip
    """Write slices of at most `page_size` rows of new keys and values, in place.

    Args:
        new_kv: [T, R, D].
        slices: [3, n] int32: for each slice its first row in the cache, its first row in new_kv, its length.
        kv_cache: [N*P, R, D]; num_slices: [1] int32.
    """
    return _write_slices(new_kv, slices, kv_cache, num_slices, page_size)


@functools.partial(jax.jit, static_argnames=(*_UPDATE_STATIC, "pipelined_dma"), donate_argnames=("kv_cache",))
def kv_cache_update_pipelined(
    new_kv: Array, slices: Array, kv_cache: Array, num_slices: Array, *, page_size: int = 32,
    num_slices_per_block: int | None = None, mesh: Any = None, kv_cache_pspec: Any = None,
    dynamic_validate_inputs: bool = False, vmem_limit_bytes: int = 40 << 20, pipelined_dma: bool | None = None,
) -> Array:  # fmt: skip
    """`kv_cache_update` as vllm_torchtpu has it."""
    return _write_slices(new_kv, slices, kv_cache, num_slices, page_size)
