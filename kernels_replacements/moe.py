"""Grouped matrix products, and what a mixture of experts is made of besides them.

Rows come sorted by group. A loop visits each block of rows with each group that has rows
in it, so that the weights of a group without rows are never read. Originals: jax 0.10.2's
megablox, vllm-torchtpu-core 0.29.0, tpu-inference 0.32.0.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_replacements.errors import KernelError

Array = jax.Array

BLOCK_ROWS = 128


def _require(condition: bool, kernel: str, message: str) -> None:
    if not condition:
        raise KernelError(f"{kernel}: {message}")


def _visits(group_sizes: Array, first_group: Array, groups: int, rows: int, block: int):
    """Which blocks of rows meet which groups, of `groups` from `first_group` on.

    Returns:
        (count [], block of each visit [V], group of each visit [V], starts and ends of all groups [G]).
    """
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    starts = ends - group_sizes
    here = jnp.arange(group_sizes.shape[0])
    here = (here >= first_group) & (here < first_group + groups) & (group_sizes > 0)
    blocks = jnp.where(here, (ends - 1) // block - starts // block + 1, 0)
    most = -(-rows // block) + group_sizes.shape[0]
    group = jnp.repeat(jnp.arange(group_sizes.shape[0]), blocks, total_repeat_length=most)
    before = jnp.cumsum(blocks) - blocks
    return blocks.sum(), starts[group] // block + jnp.arange(most) - before[group], group, starts, ends


def grouped_matmul(
    lhs: Array, group_sizes: Array, first_group: Array, groups: int, columns: int, product: Any, out: Array | None = None
) -> Array:
    """Each row times the matrix of its group.

    Args:
        lhs: [M, K], rows sorted by group.
        group_sizes: [G] int32.
        first_group: [] int32, the group of the first of the `groups` matrices.
        product: function of (rows [block, K], number of the matrix) to [block, columns] float32.
        out: [M, columns] float32, what rows of other groups keep; zeros if None.

    Returns:
        [M, columns] float32.
    """
    rows = lhs.shape[0]
    block = min(BLOCK_ROWS, rows)
    padded = -rows % block
    lhs = jnp.pad(lhs, ((0, padded), (0, 0)))
    out = jnp.zeros((rows, columns), jnp.float32) if out is None else out
    out = jnp.pad(out, ((0, padded), (0, 0)))
    count, at, group, starts, ends = _visits(group_sizes, first_group, groups, rows, block)

    def visit(index, out):
        first = at[index] * block
        new = product(lax.dynamic_slice_in_dim(lhs, first, block), group[index] - first_group)
        row = first + jnp.arange(block)
        of_group = (row >= starts[group[index]]) & (row < ends[group[index]])
        held = lax.dynamic_slice_in_dim(out, first, block)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(of_group[:, None], new, held), first, 0)

    return lax.fori_loop(0, count, visit, out)[:rows]


def _dot(a: Array, b: Array, transposed: bool = False) -> Array:
    dimensions = (((1,), (1 if transposed else 0,)), ((), ()))
    if a.dtype != b.dtype:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


# ---- jax.experimental.pallas.ops.tpu.megablox


@functools.partial(jax.jit, static_argnames=("preferred_element_type", "tiling", "transpose_rhs", "interpret"))
def gmm(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    preferred_element_type: Any = jnp.float32,
    tiling: Any = (128, 128, 128),
    group_offset: Array | None = None,
    existing_out: Array | None = None,
    transpose_rhs: bool = False,
    interpret: bool = False,
) -> Array:
    """Rows [M, K] times the matrix of their group, of [E, K, N] or transposed [E, N, K].

    Args:
        group_sizes: [G] int32; G is more than E where other chips hold the other groups.
        group_offset: [] int32, the group of the first matrix.
        existing_out: [M, N], what rows of other groups keep; else they are zeros.

    Returns:
        [M, N] in preferred_element_type.
    """
    kernel = "gmm"
    _require(lhs.ndim == 2 and rhs.ndim == 3, kernel, f"lhs {lhs.shape} and rhs {rhs.shape} must have 2 and 3 dimensions")  # fmt: skip
    _require(lhs.shape[1] == rhs.shape[2 if transpose_rhs else 1], kernel, f"lhs {lhs.shape} does not fit rhs {rhs.shape}")  # fmt: skip
    first = jnp.int32(0) if group_offset is None else group_offset.reshape(())
    columns = rhs.shape[1] if transpose_rhs else rhs.shape[2]
    out = None if existing_out is None else existing_out.astype(jnp.float32)

    def product(rows, index):
        return _dot(rows, rhs[index], transpose_rhs)

    out = grouped_matmul(lhs, group_sizes, first, rhs.shape[0], columns, product, out)
    return out.astype(preferred_element_type)


@functools.partial(jax.jit, static_argnames=("preferred_element_type", "tiling", "num_actual_groups", "interpret"))
def tgmm(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    preferred_element_type: Any = jnp.float32,
    tiling: Any = (128, 128, 128),
    group_offset: Array | None = None,
    num_actual_groups: int | None = None,
    existing_out: Array | None = None,
    interpret: bool = False,
) -> Array:
    """For each group, its columns of lhs [K, M] times its rows of rhs [M, N].

    Returns:
        [E, K, N] in preferred_element_type, of the E = num_actual_groups groups from group_offset on.
    """
    kernel = "tgmm"
    _require(lhs.ndim == rhs.ndim == 2 and lhs.shape[1] == rhs.shape[0], kernel, f"lhs {lhs.shape} does not fit rhs {rhs.shape}")  # fmt: skip
    groups = group_sizes.shape[0] if num_actual_groups is None else num_actual_groups
    first = jnp.int32(0) if group_offset is None else group_offset.reshape(())
    depth, rows = lhs.shape
    block = min(BLOCK_ROWS, rows)
    padded = -rows % block
    lhs, rhs = jnp.pad(lhs, ((0, 0), (0, padded))), jnp.pad(rhs, ((0, padded), (0, 0)))
    out = jnp.zeros((groups, depth, rhs.shape[1]), jnp.float32)
    out = out if existing_out is None else existing_out.astype(jnp.float32)
    count, at, group, starts, ends = _visits(group_sizes, first, groups, rows, block)

    def visit(index, out):
        row = at[index] * block + jnp.arange(block)
        of_group = (row >= starts[group[index]]) & (row < ends[group[index]])
        left = lax.dynamic_slice_in_dim(lhs, at[index] * block, block, axis=1)
        right = jnp.where(of_group[:, None], lax.dynamic_slice_in_dim(rhs, at[index] * block, block), 0)
        return out.at[group[index] - first].add(_dot(jnp.where(of_group[None], left, 0), right))

    return lax.fori_loop(0, count, visit, out).astype(preferred_element_type)
