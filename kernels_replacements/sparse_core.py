"""Gathers and scatters that a TPU gives to its SparseCore, and copies within pools, as plain ones.

Originals: vllm-torchtpu-core 0.29.0, tpu-inference 0.32.0.
"""

import functools

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
