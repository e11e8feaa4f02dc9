"""Lets a product of widened bfloat16 matrices read the bfloat16 ones.

bfloat16 times bfloat16 is exact in float32, and the sums are float32 either way: the result is the
same, for half the bytes and without a wide copy of the weights. SGLang's float32 output layer asks
for such products.
"""

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from bridge.compiler.module import operations, producer


def narrow_products(module: ir.Module) -> ir.Module:
    """Give each unbatched float32 `dot_general` of two converted bfloat16 tensors what they were converted from."""
    for dot in operations(module, "stablehlo.dot_general"):
        numbers = hlo.DotDimensionNumbers(dot.attributes["dot_dimension_numbers"])
        if numbers.lhs_batching_dimensions or "algorithm" in dot.attributes:
            continue
        sources = [_before_widening(operand) for operand in dot.operands]
        if None in sources:
            continue
        with ir.InsertionPoint(dot), dot.location:
            for index, (source, order) in enumerate(sources):
                dot.operation.operands[index] = source if order is None else hlo.transpose(source, order)
    return module


def _before_widening(value: ir.Value) -> tuple[ir.Value, list[int] | None] | None:
    """(bfloat16 tensor, permutation or None) of which `value` is the float32 copy; None where it is something else."""
    transpose = producer(value, "stablehlo.transpose")
    convert = producer(transpose.operands[0] if transpose is not None else value, "stablehlo.convert")
    if convert is None:
        return None
    narrow, wide = (ir.ShapedType(v.type).element_type for v in (convert.operands[0], convert.results[0]))
    if not (isinstance(narrow, ir.BF16Type) and isinstance(wide, ir.F32Type)):
        return None
    order = None if transpose is None else list(ir.DenseI64ArrayAttr(transpose.attributes["permutation"]))
    return convert.operands[0], order
