"""Sorts by "or equal": right, and within their array, however many elements are equal."""

import chip
import numpy as np
import pytest


def sort_with_positions(count: int, direction: str) -> str:
    """Sorts its argument by a comparison, and the elements' positions with it."""
    return f"""module @m {{ func.func @main(%x: tensor<{count}xi32>) -> (tensor<{count}xi32>, tensor<{count}xi32>) {{
      %i = stablehlo.iota dim = 0 : tensor<{count}xi32>
      %0:2 = "stablehlo.sort"(%x, %i) <{{dimension = 0 : i64}}> ({{
      ^bb0(%a: tensor<i32>, %b: tensor<i32>, %c: tensor<i32>, %d: tensor<i32>):
        %1 = stablehlo.compare {direction}, %a, %b : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %1 : tensor<i1>
      }}) : (tensor<{count}xi32>, tensor<{count}xi32>) -> (tensor<{count}xi32>, tensor<{count}xi32>)
      return %0#0, %0#1 : tensor<{count}xi32>, tensor<{count}xi32> }} }}"""


@pytest.mark.parametrize("direction", ["GE", "LE", "GT", "LT"])
@pytest.mark.parametrize("count", [1, 8, 36, 1000])
@pytest.mark.parametrize("values", [1, 2, 50])
def test_sort(values, count, direction):
    """The values are in order, and each came with its position; with "or equal" equal ones keep theirs."""
    x = np.random.default_rng(count).integers(0, values, count).astype(np.int32)
    ordered, positions = chip.run(sort_with_positions(count, direction), x)
    sign = -1 if direction.startswith("G") else 1
    assert np.array_equal(ordered, sign * np.sort(sign * x))
    assert np.array_equal(x[positions], ordered)
    if direction.endswith("E"):
        assert np.array_equal(positions, np.argsort(sign * x, kind="stable"))
