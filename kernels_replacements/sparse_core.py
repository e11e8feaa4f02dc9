"""Gathers and scatters that a TPU gives to its SparseCore, and copies within pools, as plain ones.

Originals: vllm-torchtpu-core 0.29.0, tpu-inference 0.32.0.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from kernels_replacements.errors import KernelError

Array = jax.Array


def _require(condition: bool, kernel: str, message: str) -> None:
    if not condition:
        raise KernelError(f"{kernel}: {message}")


@functools.partial(jax.jit, static_argnames=("reduce_group_size", "topk_wgt_zero_nan"))
def dense_gather_reduce(
    x: Array, indices: Array, topk_weights: Array, reduce_group_size: int, topk_wgt_zero_nan: bool = False
) -> Array:
    """Rows of x, each times its weight, summed over groups of neighbours.

    Args:
        x: [R, C]; indices: [T*g] int32; topk_weights: [T, g].
        topk_wgt_zero_nan: whether a row of weight 0 counts as zeros whatever it holds.

    Returns:
        [T, C] in x's dtype, summed in float32.
    """
    kernel = "dense_gather_reduce"
    _require(indices.shape[0] == topk_weights.size, kernel, f"indices {indices.shape} do not fit topk_weights {topk_weights.shape}")  # fmt: skip
    weight = topk_weights.reshape(-1, 1).astype(jnp.float32)
    rows = x[indices].astype(jnp.float32) * weight
    rows = jnp.where(weight == 0, 0, rows) if topk_wgt_zero_nan else rows
    return rows.reshape(-1, reduce_group_size, x.shape[1]).sum(1).astype(x.dtype)


@functools.partial(jax.jit, donate_argnames=("pool",))
def pallas_scatter_slots(pool: Array, indices: Array, vals: Array) -> Array:
    """The pool [N, …] with vals [B, …] in slots `indices` [B], in place; a slot that is not there is not written."""
    kernel = "pallas_scatter_slots"
    _require(pool.dtype == vals.dtype, kernel, f"pool is {pool.dtype.name} and vals are {vals.dtype.name}")
    _require(vals.shape == (indices.shape[0], *pool.shape[1:]), kernel, f"vals {vals.shape} do not fit a pool of {pool.shape}")  # fmt: skip
    indices = jnp.where(indices >= 0, indices, pool.shape[0])
    return pool.at[indices].set(vals, mode="drop")


@functools.partial(jax.jit, donate_argnames=("pool",))
def copy_blocks(pool: Array, src_indices: Array, dst_indices: Array) -> Array:
    """The pool [N, …] with pool[dst] = pool[src], in place; pairs of one block with itself are padding."""
    dst_indices = jnp.where(src_indices == dst_indices, pool.shape[0], dst_indices)
    return pool.at[dst_indices].set(pool[src_indices], mode="drop")


# ---- Gathers of a part of the rows, and their weighted sums


@jax.jit
def ragged_scatter(x: Array, indices: Array, start: Array, end: Array) -> Array:
    """x[indices], [n, C] from [R, C]; the original promises only what comes from rows start … end."""
    return x[indices]


@jax.jit
def ragged_gather_v2(x: Array, indices: Array, start: Array, end: Array) -> Array:
    """x[indices], [n, C] from [R, C]; the original promises only rows start … end of it."""
    return x[indices]


@functools.partial(jax.jit, static_argnames=("max_row_subchunks", "trim_rows"))
def ragged_gather_v2_tuned(
    x: Array, indices: Array, start: Array, end: Array, *, max_row_subchunks: int = 4, trim_rows: bool = True
) -> Array:
    """`ragged_gather_v2` as tpu_inference has it."""
    return ragged_gather_v2(x, indices, start, end)


@functools.partial(jax.jit, static_argnames=("reduce_group_size",))
def ragged_gather_reduce(
    x: Array, indices: Array, topk_weights: Array, valid_rows_mask: Array, reduce_group_size: int
) -> Array:
    """Rows of x [R, C], each times its weight where it is valid, summed over groups of neighbours.

    Args:
        indices, topk_weights, valid_rows_mask: [R].

    Returns:
        [R / reduce_group_size, C] bfloat16, summed in float32.
    """
    rows = x[indices].astype(jnp.float32) * topk_weights[:, None].astype(jnp.float32)
    rows = jnp.where(valid_rows_mask[:, None], rows, 0)
    return rows.reshape(-1, reduce_group_size, x.shape[1]).sum(1).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnames=("reduce_group_size", "tunable_params"))
def ragged_gather_reduce_tuned(
    x: Array, indices: Array, topk_weights: Array, valid_rows_mask: Array, reduce_group_size: int,
    tunable_params: Any = None,
) -> Array:  # fmt: skip
    """`ragged_gather_reduce` as tpu_inference has it."""
    return ragged_gather_reduce(x, indices, topk_weights, valid_rows_mask, reduce_group_size)


@functools.partial(
    jax.jit,
    static_argnames=(
        "reduce_group_size", "single_sc", "col_chunk_size", "row_chunk_size", "loop_unroll_factor_1",
        "loop_unroll_factor_2", "loop_unroll_factor_3", "loop_parallel_access_1", "loop_parallel_access_2",
        "loop_parallel_access_3", "topk_wgt_zero_nan",
    ),
)  # fmt: skip
def sc_gather_reduce(
    op: Array, idx: Array, topk_weights: Array | None = None, *, reduce_group_size: int, single_sc: bool = False,
    col_chunk_size: int = 3584, row_chunk_size: int = 16, loop_unroll_factor_1: int = 2,
    loop_unroll_factor_2: int = 2, loop_unroll_factor_3: int = 8, loop_parallel_access_1: bool = True,
    loop_parallel_access_2: bool = False, loop_parallel_access_3: bool = False, topk_wgt_zero_nan: bool = False,
) -> Array:  # fmt: skip
    """Rows of op [B, C] at idx [M], weighted where weights are given, summed over groups: [M / group, C] bfloat16."""
    rows = op[idx].astype(jnp.float32)
    if topk_weights is not None:
        weight = topk_weights.reshape(-1, 1).astype(jnp.float32)
        rows = jnp.where(weight == 0, 0, rows * weight) if topk_wgt_zero_nan else rows * weight
    return rows.reshape(-1, reduce_group_size, op.shape[1]).sum(1).astype(jnp.bfloat16)
