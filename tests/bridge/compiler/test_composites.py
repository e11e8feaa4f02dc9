"""Composites compute what their decompositions compute."""

import chip
import numpy as np

CUMSUM = """module @m {
  func.func @main(%x: tensor<3x5xf32>) -> tensor<3x5xf32> {
    %0 = stablehlo.composite "aten.cumsum" %x {decomposition = @cumsum, composite_attributes = {dim = 1 : i64}}
      : (tensor<3x5xf32>) -> tensor<3x5xf32>
    return %0 : tensor<3x5xf32>
  }
  func.func private @cumsum(%x: tensor<3x5xf32>) -> tensor<3x5xf32> {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = "stablehlo.reduce_window"(%x, %zero) <{padding = dense<[[0, 0], [4, 0]]> : tensor<2x2xi64>,
      window_dimensions = array<i64: 1, 5>}> ({ ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %s = stablehlo.add %a, %b : tensor<f32> stablehlo.return %s : tensor<f32> })
      : (tensor<3x5xf32>, tensor<f32>) -> tensor<3x5xf32>
    return %0 : tensor<3x5xf32>
  }
}"""

NESTED = """module @m {
  func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.composite "test.outer" %x {decomposition = @outer} : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }
  func.func private @outer(%x: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.composite "test.inner" %x {decomposition = @inner} : (tensor<4xf32>) -> tensor<4xf32>
    %1 = stablehlo.add %0, %x : tensor<4xf32>
    return %1 : tensor<4xf32>
  }
  func.func private @inner(%x: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.multiply %x, %x : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}"""


def test_a_composite_with_regions_computes_its_decomposition():
    """cumsum as torch_tpu sends it: XLA's CPU compiler would abort on the composite itself."""
    x = np.random.default_rng(0).standard_normal((3, 5), np.float32)
    (result,) = chip.run(CUMSUM, x)
    np.testing.assert_allclose(result, np.cumsum(x.astype(np.float64), axis=1), rtol=1e-6, atol=1e-6)


def test_composites_inside_composites_are_opened():
    """A decomposition may hold composites of its own."""
    x = np.arange(4, dtype=np.float32)
    (result,) = chip.run(NESTED, x)
    np.testing.assert_array_equal(result, x * x + x)


def test_no_call_is_left():
    """The later passes see one flat function, for both backends."""
    for backend in ("emulated", "libtt"):
        text = chip.rewrite(NESTED, backend)
        assert "composite" not in text and "call" not in text and text.count("func.func") == 1
