"""Multi-head latent attention of a ragged batch, as vllm_torchtpu 0.29.0 and tpu_inference 0.32.0 call it.

The cache holds one latent and one rotary key a position, side by side, which is the layout
of TTNN's MLA kernels: decodes are one `tt.*` call, prefills are composed of plain JAX.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kernels_replacements import tt_calls as tt
from kernels_replacements.errors import KernelError, NotReplaced
from kernels_replacements.ragged_attention import Batch, Rules, composed, decode_rows, read_pages, scattered

Array = jax.Array

LANES = 128


def _require(condition: bool, kernel: str, message: str) -> None:
    if not condition:
        raise KernelError(f"{kernel}: {message}")


@dataclass(frozen=True)
class Latents:
    """Pages of latents [N, P, D], which are keys whole and values in their first `value_dim` lanes."""

    data: Array
    value_dim: int
    kv_heads: int = 1

    @property
    def size(self) -> int:
        return self.data.shape[1]

    def read(self, pages: Array) -> tuple[Array, Array]:
        """Keys and values of pages [B, n], each [B, 1, n*P, D]; values have zeros behind their own lanes."""
        batch, count = pages.shape
        keys = read_pages(self.data, pages).reshape(batch, 1, count * self.size, -1)
        return keys, jnp.where(jnp.arange(keys.shape[3]) < self.value_dim, keys, 0)


def _mla(kernel, ql_nope, q_pe, new_kv_c, new_k_pe, cache_kv, batch, rules):
    """(out [T, H, L] float32, the cache), the new latents written into it in place.

    Args:
        ql_nope: [T, H, L]; q_pe: [T, H, R]; new_kv_c: [T, L]; new_k_pe: [T, R].
        cache_kv: [N, P/pk, pk, L and R, each rounded up to 128].
    """
    count, groups, packing, lanes = cache_kv.shape
    size, (total, heads, latent), rotary = groups * packing, ql_nope.shape, q_pe.shape[2]
    place = -(-latent // LANES) * LANES
    _require(q_pe.shape[:2] == (total, heads) and new_kv_c.shape == (total, latent), kernel, f"ql_nope {ql_nope.shape}, q_pe {q_pe.shape} and new_kv_c {new_kv_c.shape} do not fit")  # fmt: skip
    _require(new_k_pe.shape == (total, rotary) and lanes >= place + rotary, kernel, f"a cache of {cache_kv.shape} does not hold latents of {latent} and rotary keys of {rotary}")  # fmt: skip

    def row(nope, pe):
        """Both parts where the cache has them."""
        blank = [(0, 0)] * (nope.ndim - 1)
        nope = jnp.pad(nope, [*blank, (0, place - latent)])
        return jnp.concatenate([nope, jnp.pad(pe, [*blank, (0, lanes - place - rotary)])], -1)

    sequence, position, there = batch.tokens(total)
    page = batch.page_table[sequence, jnp.clip(position // size, 0, batch.page_table.shape[1] - 1)]
    there &= (page >= 0) & (page < count)
    slot = jnp.where(there, page * size + position % size, count * size)
    flat = cache_kv.reshape(count * size, lanes)
    flat = flat.at[slot].set(row(new_kv_c, new_k_pe).astype(flat.dtype), mode="drop")
    q, pages = row(ql_nope, q_pe.astype(ql_nope.dtype)), Latents(flat.reshape(count, size, lanes), latent)
    plain = rules.soft_cap is None and rules.window is None and rules.causal and rules.value_scale == 1.0
    if plain and size in tt.PAGE_SIZES and flat.dtype in tt.FLOATS and q.dtype in tt.FLOATS and place == latent:
        rows, positions, tokens = decode_rows(q, batch)
        table = batch.live_pages(size)
        table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % tt.TABLE_MULTIPLE)), constant_values=-1)
        cache = flat.reshape(count, 1, size, lanes)
        out = tt.mla_decode(rows[None], cache, table, positions, head_dim_v=latent, scale=rules.scale)[0]
        out = composed(q, pages, batch, rules, decoded=jnp.pad(scattered(out, tokens, total), ((0, 0), (0, 0), (0, lanes - latent))))  # fmt: skip
    else:
        out = composed(q, pages, batch, rules)
    return out[..., :latent], flat.reshape(cache_kv.shape)


def _rules(sm_scale, sliding_window, soft_cap, q_scale, k_scale, v_scale, causal=True) -> Rules:
    if q_scale is not None:
        raise NotReplaced("quantized queries (q_scale) are not replaced")
    return Rules(sm_scale * (k_scale or 1.0), sliding_window, soft_cap, causal, v_scale or 1.0)


def _batch(kv_lens, page_indices, cu_q_lens, distribution) -> Batch:
    return Batch(kv_lens, page_indices.reshape(kv_lens.shape[0], -1), cu_q_lens, distribution[2])


_STATIC = (
    "sm_scale", "sliding_window", "soft_cap", "mask_value", "q_scale", "k_scale", "v_scale", "chunk_prefill_size",
    "num_kv_pages_per_block", "num_queries_per_block", "vmem_limit_bytes", "debug_mode",
)  # fmt: skip


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames=("cache_kv",))
def mla_ragged_paged_attention_v1(
    ql_nope: Array, q_pe: Array, new_kv_c: Array, new_k_pe: Array, cache_kv: Array, kv_lens: Array,
    page_indices: Array, cu_q_lens: Array, distribution: Array, *, sm_scale: float = 1.0,
    sliding_window: int | None = None, soft_cap: float | None = None, mask_value: float | None = None,
    q_scale: float | None = None, k_scale: float | None = None, v_scale: float | None = None,
    chunk_prefill_size: int | None = None, num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None, vmem_limit_bytes: int | None = None, debug_mode: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Tokens write their latents and attend to their sequences' pages.

    Args:
        ql_nope: [T, H, L]; q_pe: [T, H, R]; new_kv_c: [T, L]; new_k_pe: [T, R].
        cache_kv: [N, P/pk, pk, L and R, each rounded up to 128].
        kv_lens: [S]; page_indices: [S*W]; cu_q_lens: [S+1]; distribution: [3]; all int32.

    Returns:
        (out [T, H, L], the cache).
    """
    rules = _rules(sm_scale, sliding_window, soft_cap, q_scale, k_scale, v_scale)
    batch = _batch(kv_lens, page_indices, cu_q_lens, distribution)
    out, cache_kv = _mla("mla_ragged_paged_attention", ql_nope, q_pe, new_kv_c, new_k_pe, cache_kv, batch, rules)
    return out.astype(ql_nope.dtype), cache_kv


_V2_STATIC = (*_STATIC, "decode_batch_size", "mixed_q_split", "s_dtype", "transpose_kv_cache", "two_step_flash_attention", "p_same_dtype_as_v")  # fmt: skip


@functools.partial(jax.jit, static_argnames=_V2_STATIC, donate_argnames=("cache_kv",))
def mla_ragged_paged_attention_v2_inference(
    ql_nope: Array, q_pe: Array, new_kv_c: Array, new_k_pe: Array, cache_kv: Array, kv_lens: Array,
    page_indices: Array, cu_q_lens: Array, distribution: Array, *, sm_scale: float = 1.0,
    sliding_window: int | None = None, soft_cap: float | None = None, mask_value: float | None = None,
    q_scale: float | None = None, k_scale: float | None = None, v_scale: float | None = None,
    chunk_prefill_size: int | None = None, num_kv_pages_per_block: Any = None, num_queries_per_block: Any = None,
    vmem_limit_bytes: int | None = None, decode_batch_size: int = 1, mixed_q_split: int = 1,
    s_dtype: Any = jnp.bfloat16, transpose_kv_cache: bool = False, two_step_flash_attention: bool = True,
    p_same_dtype_as_v: bool = True, debug_mode: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """`mla_ragged_paged_attention_v1` with heads first in ql_nope [H, T, L] and in the result."""
    return _v2(
        ql_nope, q_pe, new_kv_c, new_k_pe, cache_kv, _batch(kv_lens, page_indices, cu_q_lens, distribution),
        _rules(sm_scale, sliding_window, soft_cap, q_scale, k_scale, v_scale), transpose_kv_cache,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=(*_V2_STATIC, "use_causal_mask"), donate_argnames=("cache_kv",))
def mla_ragged_paged_attention_v2(
    ql_nope: Array, q_pe: Array, new_kv_c: Array, new_k_pe: Array, cache_kv: Array, kv_lens: Array,
    page_indices: Array, cu_q_lens: Array, distribution: Array, *, sm_scale: float = 1.0,
    sliding_window: int | None = None, soft_cap: float | None = None, mask_value: float | None = None,
    q_scale: float | None = None, k_scale: float | None = None, v_scale: float | None = None,
    chunk_prefill_size: int | None = None, num_kv_pages_per_block: Any = None, num_queries_per_block: Any = None,
    vmem_limit_bytes: int | None = None, decode_batch_size: int = 1, mixed_q_split: int = 1,
    s_dtype: Any = jnp.bfloat16, transpose_kv_cache: bool = False, two_step_flash_attention: bool = True,
    p_same_dtype_as_v: bool = True, use_causal_mask: bool = True, debug_mode: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """`mla_ragged_paged_attention_v2_inference` as vllm_torchtpu has it."""
    return _v2(
        ql_nope, q_pe, new_kv_c, new_k_pe, cache_kv, _batch(kv_lens, page_indices, cu_q_lens, distribution),
        _rules(sm_scale, sliding_window, soft_cap, q_scale, k_scale, v_scale, use_causal_mask), transpose_kv_cache,
    )  # fmt: skip


def _v2(ql_nope, q_pe, new_kv_c, new_k_pe, cache_kv, batch, rules, transposed):
    if transposed:
        raise NotReplaced("a cache with positions last (transpose_kv_cache) is not replaced")
    kernel = "mla_ragged_paged_attention (v2)"
    out, cache_kv = _mla(kernel, ql_nope.swapaxes(0, 1), q_pe, new_kv_c, new_k_pe, cache_kv, batch, rules)
    return out.swapaxes(0, 1).astype(ql_nope.dtype), cache_kv
