"""Matrix products of quantized operands, and JAX's example of a plain one.

Scales are applied to float32 sums, block of the contraction by block. Originals: jax
0.10.2, torch_tpu 0.2.0, vllm-torchtpu-core 0.29.0, tpu-inference 0.32.0.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_replacements.errors import KernelError

Array = jax.Array

SCALE_BLOCK = 128  # of torch_tpu's 1x128 and 128x128 recipes


def _require(condition: bool, kernel: str, message: str) -> None:
    if not condition:
        raise KernelError(f"{kernel}: {message}")


# ---- jax.experimental.pallas.ops.tpu.matmul


@functools.partial(jax.jit, static_argnames=("block_shape", "block_k", "out_dtype", "debug"))
def matmul(
    x: Array, y: Array, *, block_shape: Any, block_k: int = 256, out_dtype: Any = None, debug: bool = False
) -> Array:
    """[M, K] times [K, N], summed in float32, or in int32 for integers; in out_dtype."""
    _require(out_dtype is not None or x.dtype == y.dtype, "matmul", f"operands of {x.dtype.name} and {y.dtype.name} need an out_dtype")  # fmt: skip
    sums = jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32
    return jnp.dot(x, y, preferred_element_type=sums).astype(out_dtype or x.dtype)


# ---- torch_tpu's scaled products of float8


def _scaled_by_blocks(a: Array, b: Array, scale_a: Array, scale_b: Array, block: int) -> Array:
    """sum over blocks of K of scale_a[:, block] scale_b[block] (a @ b), float32.

    Args:
        a: [M, K]; b: [K, N]; scale_a: [M, K/block]; scale_b: [K/block, N].
    """
    rows, depth = a.shape
    left = a.astype(jnp.float32).reshape(rows, -1, block) * scale_a.astype(jnp.float32)[:, :, None]
    right = b.astype(jnp.float32).reshape(-1, block, b.shape[1]) * scale_b.astype(jnp.float32)[:, None]
    return jnp.dot(left.reshape(rows, depth), right.reshape(depth, -1), precision=lax.Precision.HIGHEST)


@functools.partial(jax.jit, static_argnames=("block_size", "out_dtype", "tile_m", "tile_n", "tile_k", "transpose_rhs"))
def blockwise_scaled_mm(
    a: Array, b: Array, scale_a: Array, scale_b: Array, *, block_size: int = 32, out_dtype: Any = jnp.bfloat16,
    tile_m: int = 256, tile_n: int = 256, tile_k: int = 512, transpose_rhs: bool = False,
) -> Array:  # fmt: skip
    """[M, K] times [K, N] of float8, one scale for each row or column and block of K.

    Args:
        b: [K, N], or [N, K] with transpose_rhs.
        scale_a: [M, K/block_size]; scale_b: [K/block_size, N].

    Returns:
        [M, N] in out_dtype.
    """
    kernel = "blockwise_scaled_mm"
    b = b.T if transpose_rhs else b
    (rows, depth), columns = a.shape, b.shape[1]
    _require(b.shape[0] == depth and depth % block_size == 0, kernel, f"a {a.shape} and b {b.shape} do not fit blocks of {block_size}")  # fmt: skip
    blocks = depth // block_size
    _require(scale_a.shape == (rows, blocks) and scale_b.shape == (blocks, columns), kernel, f"scales {scale_a.shape} and {scale_b.shape} must be {(rows, blocks)} and {(blocks, columns)}")  # fmt: skip
    return _scaled_by_blocks(a, b, scale_a, scale_b, block_size).astype(out_dtype)


@functools.partial(jax.jit, static_argnames=("out_dtype", "tile_m", "tile_n", "tile_k"))
def scaled_mm_1x128_128x128(
    a: Array, b: Array, scale_a: Array, scale_b: Array, *, out_dtype: Any = jnp.bfloat16, tile_m: int = 512,
    tile_n: int = 512, tile_k: int = 1024, bias: Array | None = None,
) -> Array:  # fmt: skip
    """[M, K] times [K, N] of float8: a's scales for each row and 128 of K, b's for each tile of 128 by 128.

    Args:
        scale_a: [M, ceil(K/128)]; scale_b: [ceil(K/128), ceil(N/128)].
        bias: [N] or None.

    Returns:
        [M, N] in out_dtype.
    """
    kernel = "scaled_mm_1x128_128x128"
    (rows, depth), columns = a.shape, b.shape[1]
    blocks = -(-depth // SCALE_BLOCK)
    _require(scale_a.shape == (rows, blocks), kernel, f"scale_a {scale_a.shape} must be {(rows, blocks)}")
    _require(scale_b.shape == (blocks, -(-columns // SCALE_BLOCK)), kernel, f"scale_b {scale_b.shape} does not fit b {b.shape}")  # fmt: skip
    padded = blocks * SCALE_BLOCK - depth
    a, b = jnp.pad(a, ((0, 0), (0, padded))), jnp.pad(b, ((0, padded), (0, 0)))
    by_column = jnp.repeat(scale_b, SCALE_BLOCK, axis=1)[:, :columns]
    out = _scaled_by_blocks(a, b, scale_a, by_column, SCALE_BLOCK)
    out = out if bias is None else out + bias.astype(jnp.float32)
    return out.astype(out_dtype)


# ---- vllm_torchtpu and tpu_inference: weights quantized by column or by block


def _quantized(x: Array, dtype: Any, zero_guard: bool) -> tuple[Array, Array]:
    """Rows of x in a narrow dtype, and the scale of each, as the originals quantize activations."""
    info = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
    scale = jnp.abs(x).max(-1, keepdims=True) / float(info.max)
    if zero_guard:
        return (x * jnp.nan_to_num(1 / scale, float(info.max))).astype(dtype), scale.astype(jnp.float32)
    return (x / scale).astype(dtype), scale.astype(jnp.float32)


def _product(x: Array, w: Array) -> Array:
    """[M, K] times [N, K] transposed: exact in int32 for integers, else float32."""
    integers = jnp.issubdtype(x.dtype, jnp.integer) and jnp.issubdtype(w.dtype, jnp.integer)
    kind = jnp.int32 if integers else jnp.float32
    dimensions = (((1,), (1,)), ((), ()))
    return lax.dot_general(x.astype(kind), w.astype(kind), dimensions, preferred_element_type=kind).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames=("block_size", "x_q_dtype", "tuned_value"))
def quantized_matmul_by_column(
    x: Array, w_q: Array, w_scale: Array, w_zp: Array | None = None, block_size: int | None = None,
    x_q_dtype: Any = None, *, tuned_value: Any = None,
) -> Array:  # fmt: skip
    """[M, K] times quantized [N, K] transposed, with a scale for each output column.

    Args:
        w_scale: [N].
        x_q_dtype: what rows of x are quantized to; None or x's own dtype for not at all.

    Returns:
        [M, N] in x's dtype.
    """
    kernel = "quantized_matmul_kernel"
    _require(w_zp is None and block_size is None, kernel, "a zero point or a block size is not for this kernel")
    _require(x.shape[1] == w_q.shape[1] and w_scale.shape == w_q.shape[:1], kernel, f"x {x.shape}, w_q {w_q.shape} and w_scale {w_scale.shape} do not fit")  # fmt: skip
    rows, row_scale = x, 1.0
    if x_q_dtype is not None and x_q_dtype != x.dtype:
        rows, row_scale = _quantized(x, x_q_dtype, zero_guard=False)
    return (_product(rows, w_q) * w_scale.astype(jnp.float32) * row_scale).astype(x.dtype)


@functools.partial(jax.jit, static_argnames=("block_size", "x_q_dtype", "tuned_value"))
def quantized_matmul_by_block(
    x: Array, w_q: Array, w_scale: Array, w_zp: Array | None = None, block_size: int | None = None,
    x_q_dtype: Any = None, *, tuned_value: Any = None,
) -> Array:  # fmt: skip
    """[M, K] times quantized [N, K] transposed, with a scale for each output column and block of K.

    Args:
        w_scale: [K/block_size, 1, N].
        x_q_dtype: what blocks of x's rows are quantized to; None or x's own dtype for not at all.

    Returns:
        [M, N] in x's dtype.
    """
    kernel = "quantized_matmul_kernel (blockwise)"
    _require(w_zp is None and block_size is not None and block_size > 0, kernel, "a block size and no zero point are needed")  # fmt: skip
    (count, depth), columns = x.shape, w_q.shape[0]
    _require(depth % block_size == 0 and w_scale.shape == (depth // block_size, 1, columns), kernel, f"w_scale {w_scale.shape} does not fit x {x.shape} in blocks of {block_size}")  # fmt: skip
    out = jnp.zeros((count, columns), jnp.float32)
    for block in range(depth // block_size):
        part = slice(block * block_size, (block + 1) * block_size)
        rows, row_scale = x[:, part], 1.0
        if x_q_dtype is not None and x_q_dtype != x.dtype:
            rows, row_scale = _quantized(rows, x_q_dtype, zero_guard=True)
        out = out + _product(rows, w_q[:, part]) * w_scale[block].astype(jnp.float32) * row_scale
    return out.astype(x.dtype)


@functools.partial(jax.jit, static_argnames=("mesh", "axis_name", "collective_id", "bn", "bk", "rhs_transpose"))
def all_gather_matmul(
    x: Array, y: Array, mesh: Any, axis_name: str, collective_id: int | None = 0, bn: int | None = None,
    bk: int | None = None, rhs_transpose: bool = False,
) -> Array:  # fmt: skip
    """Rows of x [M, K], gathered over a mesh axis, times y [K, N] or, transposed, [N, K]; columns stay apart.

    The arrays are global: the partitioner gathers what their shardings keep apart.
    """
    dimensions = (((1,), (1 if rhs_transpose else 0,)), ((), ()))
    return lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32).astype(x.dtype)
