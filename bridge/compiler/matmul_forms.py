"""Gives matrix products of the emulated chip to our own matmul where XLA's CPU compiler is slow.

Measured: with the few rows of a decode step XLA reads weights at a tenth of the memory's
speed, and bfloat16 weights kept as [N, K], which is how torch keeps them, are slow at any
number of rows. The one rule is in `_is_ours`. The silicon's compiler has kernels of its own:
this pass is for the emulated chip only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from bridge.compiler.module import operations, producer

TARGET = "tt_tpu.matmul"
# Below this many weights a call costs more than it saves.
_LEAST_WEIGHTS = 4096
# With [K, N] weights XLA is the faster one from here on; the handler takes no more than 64.
_MOST_ROWS_KN = 32
# With float [N, K] weights XLA is as fast from here on.
_MOST_ROWS_F32 = 64


@dataclass(frozen=True)
class _Operand:
    """One side of a product as a matrix.

    Attributes:
        value: the tensor, before any transpose that only moves the contracted axes.
        free: sizes of the axes that the result keeps.
        contracted: product of the contracted sizes.
        contracted_last: whether the contracted axes are the last ones, else they are the first.
    """

    value: ir.Value
    free: tuple[int, ...]
    contracted: int
    contracted_last: bool

    @property
    def rows(self) -> int:
        return math.prod(self.free)


def use_own_matmul(module: ir.Module) -> ir.Module:
    """Replace each `dot_general` that is a plain matrix product, and ours by the rule, with a call of our matmul."""
    for dot in operations(module, "stablehlo.dot_general"):
        numbers = hlo.DotDimensionNumbers(dot.attributes["dot_dimension_numbers"])
        if numbers.lhs_batching_dimensions or "algorithm" in dot.attributes:
            continue
        left = _operand(dot.operands[0], list(numbers.lhs_contracting_dimensions))
        right = _operand(dot.operands[1], list(numbers.rhs_contracting_dimensions))
        if left is None or right is None or not _types_fit(dot):
            continue
        with ir.InsertionPoint(dot), dot.location:
            result = _product(left, right, dot.results[0].type)
        if result is not None:
            dot.results[0].replace_all_uses_with(result)
            dot.erase()
    return module


def _is_ours(x: _Operand, weights: _Operand, element: str) -> bool:
    """The rule: which side is x, and whether XLA would be slower."""
    if not x.contracted_last or weights.rows * weights.contracted < _LEAST_WEIGHTS:
        return False
    if not weights.contracted_last:
        return x.rows <= _MOST_ROWS_KN
    return element == "bf16" or x.rows <= _MOST_ROWS_F32


def _product(left: _Operand, right: _Operand, result: ir.Type) -> ir.Value | None:
    """left * right by our matmul, or None when the rule leaves it to XLA."""
    element = str(ir.ShapedType(left.value.type).element_type)
    if left.rows > right.rows and right.rows <= _MOST_ROWS_KN:
        # Weights on the left, as in torch.mv: compute the transposed product.
        if not _is_ours(right, left, element):
            return None
        flipped = _call(right, left, ir.ShapedType(result).element_type)
        return _shaped(hlo.transpose(flipped, [1, 0]), ir.ShapedType(result).shape)
    if not _is_ours(left, right, element):
        return None
    return _shaped(_call(left, right, ir.ShapedType(result).element_type), ir.ShapedType(result).shape)


def _call(x: _Operand, weights: _Operand, element: ir.Type) -> ir.Value:
    """Our matmul, [x.rows, weights.rows]. Row-major is asked for: a custom call may else get any layout."""
    shape = (weights.rows, weights.contracted) if weights.contracted_last else (weights.contracted, weights.rows)
    row_major = ir.Attribute.parse("dense<[1, 0]> : tensor<2xindex>")
    return hlo.custom_call(
        [ir.RankedTensorType.get((x.rows, weights.rows), element)],
        [_shaped(x.value, (x.rows, x.contracted)), _shaped(weights.value, shape)],
        TARGET,
        api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4),
        backend_config=ir.DictAttr.get({"nk": ir.BoolAttr.get(weights.contracted_last)}),
        operand_layouts=ir.ArrayAttr.get([row_major, row_major]),
        result_layouts=ir.ArrayAttr.get([row_major]),
    )


def _shaped(value: ir.Value, shape: Sequence[int]) -> ir.Value:
    kind = ir.RankedTensorType.get(shape, ir.ShapedType(value.type).element_type)
    return value if value.type == kind else hlo.reshape(kind, value)


def _types_fit(dot: ir.OpView) -> bool:
    left, right = (str(ir.ShapedType(operand.type).element_type) for operand in dot.operands)
    result = str(ir.ShapedType(dot.results[0].type).element_type)
    return left == right and left in ("f32", "bf16") and result in ("f32", left)


def _operand(value: ir.Value, contracted: list[int]) -> _Operand | None:
    """`value` as a matrix, looked at through a transpose if that makes it one; None when its axes are mixed."""
    source = producer(value, "stablehlo.transpose")
    if source is not None:
        order = list(ir.DenseI64ArrayAttr(source.attributes["permutation"]))
        free = [order[axis] for axis in range(len(order)) if axis not in contracted]
        found = _as_matrix(source.operands[0], free, [order[axis] for axis in contracted])
        if found is not None:
            return found
    rank = ir.ShapedType(value.type).rank
    return _as_matrix(value, [axis for axis in range(rank) if axis not in contracted], contracted)


def _as_matrix(value: ir.Value, free: list[int], contracted: list[int]) -> _Operand | None:
    kind = ir.ShapedType(value.type)
    if not kind.has_static_shape:
        return None
    axes = list(range(kind.rank))
    if axes not in (free + contracted, contracted + free):
        return None
    size = math.prod(kind.shape[axis] for axis in contracted)
    return _Operand(value, tuple(kind.shape[axis] for axis in free), size, axes == free + contracted)
