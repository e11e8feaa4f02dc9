"""Reductions of 16-bit floats are as exact as their result type allows, in every layout."""

import chip
import ml_dtypes
import numpy as np
import pytest

TYPES = {"bf16": (ml_dtypes.bfloat16, 2.0**-8), "f16": (np.float16, 2.0**-11)}


def reduction(kind: str, shape: tuple[int, ...], dimensions: tuple[int, ...], operation="add", start="0.0") -> str:
    """A program that reduces its argument."""
    left = [size for axis, size in enumerate(shape) if axis not in dimensions]
    tensor, result = ("x".join([*map(str, sizes), kind]) for sizes in (shape, left))
    axes = ", ".join(map(str, dimensions))
    return f"""module @m {{ func.func @main(%x: tensor<{tensor}>) -> tensor<{result}> {{
      %start = stablehlo.constant dense<{start}> : tensor<{kind}>
      %0 = stablehlo.reduce(%x init: %start) applies stablehlo.{operation} across dimensions = [{axes}]
        : (tensor<{tensor}>, tensor<{kind}>) -> tensor<{result}>
      return %0 : tensor<{result}> }} }}"""


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    ("shape", "dimensions"), (((2500,), (0,)), ((50, 50), (0, 1)), ((100, 9), (0,)), ((20, 3, 20), (0, 2)), ((6, 80), (1,)))
)
def test_sums(kind, shape, dimensions):
    """A sum is rounded once: half a unit in the last place of its type, and float32's own error."""
    dtype, half = TYPES[kind]
    x = (np.random.default_rng(0).random(shape) * 10).astype(dtype)
    (result,) = chip.run(reduction(kind, shape, dimensions), x)
    exact = x.astype(np.float64).sum(axis=dimensions)
    assert result.dtype == dtype
    assert (np.abs(result.astype(np.float64) - exact) <= exact * half * 1.01).all()


def test_products():
    """A product is rounded once as well."""
    x = (1 + np.random.default_rng(0).random((20, 20)) / 50).astype(ml_dtypes.bfloat16)
    (result,) = chip.run(reduction("bf16", (20, 20), (0, 1), "multiply", "1.0"), x)
    exact = x.astype(np.float64).prod()
    assert abs(float(result) - exact) <= exact * 2.0**-8 * 1.01


def test_sums_of_windows():
    """A sliding sum, as of an average pool, is rounded once."""
    program = """module @m { func.func @main(%x: tensor<64x64xbf16>) -> tensor<2x2xbf16> {
      %zero = stablehlo.constant dense<0.0> : tensor<bf16>
      %0 = "stablehlo.reduce_window"(%x, %zero) <{window_dimensions = array<i64: 32, 32>, window_strides = array<i64: 32, 32>}>
        ({ ^bb0(%a: tensor<bf16>, %b: tensor<bf16>):
          %s = stablehlo.add %a, %b : tensor<bf16> stablehlo.return %s : tensor<bf16> })
        : (tensor<64x64xbf16>, tensor<bf16>) -> tensor<2x2xbf16>
      return %0 : tensor<2x2xbf16> } }"""
    x = np.random.default_rng(0).random((64, 64)).astype(ml_dtypes.bfloat16)
    (result,) = chip.run(program, x)
    exact = x.astype(np.float64).reshape(2, 32, 2, 32).sum(axis=(1, 3))
    assert (np.abs(result.astype(np.float64) - exact) <= exact * 2.0**-8 * 1.01).all()


@pytest.mark.parametrize("kind", TYPES)
def test_sums_by_scatter(kind):
    """What many updates add to one element is rounded once; other elements keep their bits."""
    arguments = f"%x: tensor<3x{kind}>, %at: tensor<900x1xi32>, %y: tensor<900x{kind}>"
    program = f"""module @m {{ func.func @main({arguments}) -> tensor<3x{kind}> {{
      %0 = "stablehlo.scatter"(%x, %at, %y) <{{scatter_dimension_numbers = #stablehlo.scatter<
          inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}}>
        ({{ ^bb0(%a: tensor<{kind}>, %b: tensor<{kind}>):
          %s = stablehlo.add %a, %b : tensor<{kind}> stablehlo.return %s : tensor<{kind}> }})
        : (tensor<3x{kind}>, tensor<900x1xi32>, tensor<900x{kind}>) -> tensor<3x{kind}>
      return %0 : tensor<3x{kind}> }} }}"""
    dtype, half = TYPES[kind]
    x, y = (np.random.default_rng(0).random(size).astype(dtype) for size in (3, 900))
    at = np.arange(900, dtype=np.int32).reshape(900, 1) % 2
    (result,) = chip.run(program, x, at, y)
    exact = x.astype(np.float64)
    np.add.at(exact, at[:, 0], y.astype(np.float64))
    assert (np.abs(result.astype(np.float64) - exact) <= exact * half * 1.01).all()
    assert result[2] == x[2]


@pytest.mark.parametrize(("kind", "operation"), (("bf16", "maximum"), ("f32", "add"), ("i32", "add")))
def test_what_is_exact_stays(kind, operation):
    """Maxima, and sums of other types, are left as they are."""
    text = chip.rewrite(reduction(kind, (4, 4), (0,), operation, "0" if kind == "i32" else "0.0"))
    assert "convert" not in text and f"tensor<4x4x{kind}>" in text
