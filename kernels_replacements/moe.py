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

from kernels_replacements import tt_calls as tt
from kernels_replacements.errors import KernelError, NotReplaced

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


# ---- vllm_torchtpu's gmm_v2 and tpu_inference's gmm: scales, biases and activations


def _activated(gate: Array, up: Array, name: str) -> Array:
    """The gated activations that gmm_v2 fuses, by their names there."""
    if name in ("silu", "gelu", "gelu_tanh"):
        function = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}  # fmt: skip
        return function[name](gate) * up
    if name == "swigluoai":
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
        return (up + 1.0) * gate * jax.nn.sigmoid(1.702 * gate)
    if name == "silu_and_mul_with_clamp":
        return jax.nn.silu(jnp.minimum(gate, 10.0)) * jnp.clip(up, -10.0, 10.0)
    raise NotReplaced(f"the activation {name} is not known")


def _scaled_product(rows: Array, weight: Array, scale: Array | None) -> Array:
    """rows [M, K] @ weight [K, N], whose blocks of K have scales [blocks, 1, N]; float32."""
    if scale is None:
        return _dot(rows, weight)
    blocks = scale.shape[0]
    apart = weight.astype(jnp.float32).reshape(blocks, -1, weight.shape[1]) * scale.astype(jnp.float32)
    return _dot(rows.astype(jnp.float32), apart.reshape(weight.shape))


def _scaled_groups(kernel, lhs, rhs, group_sizes, scale, bias, offset, activation=None, out=None):
    """Rows times the matrix of their group with scales, bias and activation: [M, N] or, activated, [M, N/2] float32."""
    _require(lhs.ndim == 2 and rhs.ndim == 3 and lhs.shape[1] == rhs.shape[1], kernel, f"lhs {lhs.shape} does not fit rhs {rhs.shape}")  # fmt: skip
    columns = rhs.shape[2]
    _require(scale is None or scale.shape[::3] == (rhs.shape[0], columns), kernel, "rhs_scale does not fit rhs")
    _require(bias is None or bias.shape == (rhs.shape[0], 1, columns), kernel, "rhs_bias does not fit rhs")

    def product(rows, index):
        one = _scaled_product(rows, rhs[index], None if scale is None else scale[index])
        one = one if bias is None else one + bias[index].astype(jnp.float32)
        return one if activation is None else _activated(one[:, : columns // 2], one[:, columns // 2 :], activation)

    first = jnp.int32(0) if offset is None else jnp.asarray(offset).reshape(())
    width = columns if activation is None else columns // 2
    return grouped_matmul(lhs, group_sizes, first, rhs.shape[0], width, product, out)


@functools.partial(
    jax.jit,
    static_argnames=(
        "tile_info", "vmem_limit_bytes", "precision", "preferred_element_type", "acc_dtype", "maybe_quantize_lhs",
        "zero_initialize", "fuse_act", "rhs_quant_dtype",
    ),
)  # fmt: skip
def gmm_v2(
    lhs: Array, rhs: Array, group_sizes: Array, rhs_scale: Array | None = None, rhs_bias: Array | None = None,
    group_offset: Array | None = None, *, tile_info: Any = None, vmem_limit_bytes: int | None = None,
    precision: Any = None, preferred_element_type: Any = None, acc_dtype: Any = None,
    maybe_quantize_lhs: bool = True, zero_initialize: bool = True, fuse_act: str | None = None,
    rhs_quant_dtype: Any = None,
) -> Array:  # fmt: skip
    """Rows [M, K] times the matrix of their group, of [E, K, N]; with `fuse_act` columns are gates, then values.

    Rows are not quantized, whatever maybe_quantize_lhs says: the result is the more exact one.

    Args:
        group_sizes: [G] int32; group_offset: [1] int32, the group of the first matrix.
        rhs_scale: [E, blocks, 1, N]; rhs_bias: [E, 1, N].

    Returns:
        [M, N], or [M, N/2] with fuse_act; zeros for rows of other groups.
    """
    if rhs_quant_dtype is not None and rhs_quant_dtype != rhs.dtype:
        raise NotReplaced(f"matrices of {rhs_quant_dtype} packed into {rhs.dtype.name} are not replaced")
    out = _scaled_groups("gmm_v2", lhs, rhs, group_sizes, rhs_scale, rhs_bias, group_offset, fuse_act)
    return out.astype(preferred_element_type or lhs.dtype)


@functools.partial(jax.jit, static_argnames=("preferred_element_type", "tiling", "interpret"))
def gmm_scaled(
    lhs: Array, rhs: Array, group_sizes: Array, preferred_element_type: Any = jnp.float32,
    rhs_scale: Array | None = None, rhs_bias: Array | None = None, tiling: Any = None,
    group_offset: Array | None = None, existing_out: Array | None = None, interpret: bool = False,
) -> Array:  # fmt: skip
    """`gmm` as tpu_inference has it, with rhs_scale [E, blocks, 1, N] and rhs_bias [E, 1, N]."""
    kept = None if existing_out is None else existing_out.astype(jnp.float32)
    out = _scaled_groups("gmm", lhs, rhs, group_sizes, rhs_scale, rhs_bias, group_offset, out=kept)
    return out.astype(preferred_element_type)


# ---- Routing


@functools.partial(jax.jit, static_argnames=("topk",))
def router_topk(scores: Array, topk: int) -> tuple[Array, Array]:
    """The largest scores of each row, descending, and their columns; of equal ones the first.

    Args:
        scores: [R, E] float32.

    Returns:
        ([R, topk] float32, NaN for a row without a score above -3e38, [R, topk] int32).
    """
    lowest = -3.0e38
    left = jnp.where(scores > lowest, scores.astype(jnp.float32), lowest)
    column = jnp.arange(scores.shape[1])
    values, columns = [], []
    for _ in range(topk):
        values.append(left.max(1))
        columns.append(jnp.argmax(left, axis=1).astype(jnp.int32))
        left = jnp.where(column == columns[-1][:, None], jnp.finfo(jnp.float32).min, left)
    value = jnp.stack(values, 1)
    return jnp.where(value[:, :1] <= lowest, jnp.nan, value), jnp.stack(columns, 1)


_SCORES = {"softmax": lambda x: jax.nn.softmax(x, -1), "sigmoid": jax.nn.sigmoid}
_FUSED_STATIC = (
    "mesh", "top_k", "renormalize_topk_logits", "act_fn", "scoring_fn", "subc_quant_w1_sz", "subc_quant_w2_sz", "bt",
    "bf", "bd1", "bd2", "btc", "bfc", "bd1c", "bd2c", "ep_axis_name",
)  # fmt: skip


@functools.partial(jax.jit, static_argnames=_FUSED_STATIC)
def fused_ep_moe(
    mesh: Any, tokens: Array, w1: Array, w2: Array, gating_output: Array, top_k: int, *,
    renormalize_topk_logits: bool = False, act_fn: str = "silu", scoring_fn: str = "softmax",
    subc_quant_w1_sz: int | None = None, subc_quant_w2_sz: int | None = None, w1_scale: Array | None = None,
    w2_scale: Array | None = None, b1: Array | None = None, b2: Array | None = None, bt: int, bf: int, bd1: int,
    bd2: int, btc: int, bfc: int, bd1c: int, bd2c: int, ep_axis_name: str = "model",
) -> Array:  # fmt: skip
    """A mixture of experts: routing, gated experts, and their weighted sum.

    Args:
        tokens: [T, C]; w1: [E, 2, C, I], gates and values; w2: [E, I, C]; gating_output: [T, E].

    Returns:
        [T, C] in the tokens' dtype.
    """
    if scoring_fn not in _SCORES or any(x is not None for x in (w1_scale, w2_scale, b1, b2)) or act_fn != "silu":
        raise NotReplaced(f"scores by {scoring_fn}, experts by {act_fn}, scales and biases are not all replaced")
    weights, ids = router_topk(_SCORES[scoring_fn](gating_output.astype(jnp.float32)), top_k)
    if renormalize_topk_logits:
        weights = weights / weights.sum(-1, keepdims=True)
    if tokens.dtype == jnp.bfloat16 and w1.dtype in tt.FLOATS and mesh.size == 1:
        return tt.fused_moe_ep(tokens, weights, ids, w1[:, 0], w1[:, 1], w2)
    share = jnp.zeros(gating_output.shape, jnp.float32).at[jnp.arange(tokens.shape[0])[:, None], ids].add(weights)
    x = tokens.astype(jnp.float32)
    gate, up = (jnp.einsum("tc,eci->eti", x, w1[:, i].astype(jnp.float32)) for i in (0, 1))
    out = jnp.einsum("eti,eic,te->tc", jax.nn.silu(gate) * up, w2.astype(jnp.float32), share)
    return out.astype(tokens.dtype)
