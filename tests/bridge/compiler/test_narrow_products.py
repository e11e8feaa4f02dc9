"""Products of widened bfloat16 matrices: computed from the bfloat16 ones, with the same result."""

import chip
import ml_dtypes
import numpy as np
import pytest

from bridge.compiler import module as modules
from bridge.compiler.narrow_products import narrow_products


def product(weights: str, contracted: int, middle: str = "%w") -> str:
    """x [5, 64] bfloat16 and weights, both widened, then multiplied; `middle` is what the product takes."""
    return f"""module @m {{ func.func @main(%x: tensor<5x64xbf16>, %narrow: tensor<{weights}xbf16>) -> tensor<5x96xf32> {{
      %a = stablehlo.convert %x : (tensor<5x64xbf16>) -> tensor<5x64xf32>
      %w = stablehlo.convert %narrow : (tensor<{weights}xbf16>) -> tensor<{weights}xf32>
      %t = stablehlo.transpose %w, dims = [1, 0] : (tensor<{weights}xf32>) -> tensor<{"x".join(reversed(weights.split("x")))}xf32>
      %0 = stablehlo.dot_general %a, {middle}, contracting_dims = [1] x [{contracted}]
        : (tensor<5x64xf32>, tensor<{"64x96" if contracted == 0 else "96x64"}xf32>) -> tensor<5x96xf32>
      return %0 : tensor<5x96xf32> }} }}"""


@pytest.mark.parametrize(
    ("weights", "contracted", "middle"), [("64x96", 0, "%w"), ("96x64", 1, "%w"), ("96x64", 0, "%t"), ("64x96", 1, "%t")]
)
def test_the_result_is_that_of_the_wide_product(weights, contracted, middle):
    """Whichever way the weights lie, the result has float32's precision."""
    generator = np.random.default_rng(0)
    shape = tuple(map(int, weights.split("x")))
    x, w = (generator.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((5, 64), shape))
    (result,) = chip.run(product(weights, contracted, middle), x, w)
    exact = x.astype(np.float64) @ w.astype(np.float64).reshape(shape).T if shape == (96, 64) else x.astype(np.float64) @ w.astype(np.float64)
    assert result.dtype == np.float32
    assert np.abs(result - exact).max() < 1e-5 * np.abs(exact).max()


def rewritten(program: str) -> str:
    context = modules.make_context()
    with context:
        return str(narrow_products(modules.parse(context, program.encode())))


def test_no_wide_copy_of_the_weights_is_read():
    """The product's operands are the bfloat16 tensors."""
    text = rewritten(product("64x96", 0))
    (line,) = [line for line in text.splitlines() if "dot_general" in line]
    assert "tensor<5x64xbf16>, tensor<64x96xbf16>) -> tensor<5x96xf32>" in line


def test_a_product_with_one_wide_side_stays():
    """Where one side was float32 from the start, narrowing the other would not fit."""
    program = product("64x96", 0).replace("%x: tensor<5x64xbf16>", "%x: tensor<5x64xf32>")
    program = program.replace("stablehlo.convert %x : (tensor<5x64xbf16>)", "stablehlo.convert %x : (tensor<5x64xf32>)")
    (line,) = [line for line in rewritten(program).splitlines() if "dot_general" in line]
    assert "tensor<5x64xf32>, tensor<64x96xf32>" in line
