"""Quantized matrix products against float64, and torch_tpu's kernels interpreted by JAX."""

import importlib.util
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kernels_replacements import quantized_matmul as ours

BF16, F32, F8 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(ml_dtypes.float8_e4m3fn)


def error(got, expected):
    """Largest difference relative to the largest value."""
    got, expected = np.asarray(got).astype(np.float64), np.asarray(expected).astype(np.float64)
    assert np.isfinite(got).all()
    return np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-9)


def random(*shapes, dtype=F32):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(F32).astype(dtype) for shape in shapes]


def torch_tpu_kernel(name):
    """A module of torch_tpu's kernels, loaded without torch_tpu, which would want a chip."""
    package = importlib.util.find_spec("torch_tpu")
    path = Path(package.submodule_search_locations[0]) / "_internal/ops/scaled_mm/kernels" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interpreted(function, *arguments, **options):
    from jax.experimental.pallas import tpu as pltpu

    with pltpu.force_tpu_interpret_mode():
        return np.asarray(function(*arguments, **options))


@pytest.mark.parametrize("transposed", [False, True])
def test_scales_by_row_and_block(transposed):
    """torch_tpu's blocks of 32: at most twice the interpreted original's error."""
    a, b = random((64, 128), (128, 128), dtype=F8)
    scale_a, scale_b = (np.abs(x) for x in random((64, 4), (4, 128)))
    wide = np.repeat(scale_a, 32, 1) * a.astype(np.float64), np.repeat(scale_b, 32, 0) * b.astype(np.float64)
    expected = wide[0] @ wide[1]
    given = np.ascontiguousarray(b.T) if transposed else b
    options = {"out_dtype": F32, "transpose_rhs": transposed}
    mine = error(ours.blockwise_scaled_mm(a, given, scale_a, scale_b, **options), expected)
    original = torch_tpu_kernel("blockwise_scaled_mm_kernel").blockwise_scaled_mm
    theirs = error(interpreted(original, a, given, scale_a, scale_b, tile_m=64, tile_n=128, tile_k=128, **options), expected)
    assert mine <= 2 * max(theirs, 1e-6)


def test_scales_by_row_and_tile():
    """torch_tpu's 1x128 and 128x128 recipe, with a bias and a last tile that is not whole."""
    a, b = random((32, 256), (256, 160), dtype=F8)
    scale_a, scale_b, bias = random((32, 2), (2, 2), (160,))
    right = b.astype(np.float64) * np.repeat(np.repeat(scale_b, 128, 0), 128, 1)[:, :160]
    expected = (a.astype(np.float64) * np.repeat(scale_a, 128, 1)) @ right + bias
    mine = error(ours.scaled_mm_1x128_128x128(a, b, scale_a, scale_b, out_dtype=F32, bias=bias), expected)
    original = torch_tpu_kernel("blockwise128_scaled_mm_kernel").scaled_mm_1x128_128x128
    tiles = {"tile_m": 32, "tile_n": 128, "tile_k": 256}
    theirs = error(interpreted(original, a, b, scale_a, scale_b, out_dtype=F32, bias=bias, **tiles), expected)
    assert mine <= 2 * max(theirs, 1e-6)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_matmul(dtype):
    """JAX's example kernel."""
    x, y = random((64, 96), (96, 32), dtype=dtype)
    out = ours.matmul(x, y, block_shape=(32, 32))
    assert error(out, x.astype(np.float64) @ y.astype(np.float64)) < (2e-2 if dtype == BF16 else 1e-5)


def test_weights_quantized_by_block():
    """Each block of the contraction has its own scale; activations are quantized to int8 where asked."""
    x, w = random((8, 256), (64, 256))
    scale = np.abs(w.reshape(64, 2, 128)).max(-1) / 127
    w_q = np.rint(w.reshape(64, 2, 128) / scale[..., None]).astype(np.int8).reshape(64, 256)
    expected = x.astype(np.float64) @ (w_q.reshape(64, 2, 128) * scale[..., None]).reshape(64, 256).T
    scales = scale.T[:, None].astype(F32)
    assert error(ours.quantized_matmul_by_block(x, w_q, scales, None, 128), expected) < 1e-5
    assert error(ours.quantized_matmul_by_block(x, w_q, scales, None, 128, np.int8), expected) < 2e-2


def test_scales_of_another_shape_are_an_error():
    """The message names the kernel and both shapes."""
    from kernels_replacements.errors import KernelError

    x, w = random((8, 256), (64, 256))
    with pytest.raises(KernelError, match=r"blockwise.*w_scale \(64,\) does not fit"):
        ours.quantized_matmul_by_block(x, w, np.ones(64, F32), None, 128)
