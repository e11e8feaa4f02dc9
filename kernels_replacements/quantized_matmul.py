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
