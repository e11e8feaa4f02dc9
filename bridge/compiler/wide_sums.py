"""Lets sums and products of 16-bit floats accumulate in float32, as a TPU and a Tenstorrent chip do.

XLA's CPU compiler takes a reduction or a scatter in bfloat16 at its word and rounds after every
addition: the sum of 2500 numbers is then wrong by a seventh.
"""

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from bridge.compiler.module import operations

_REDUCTIONS = ("stablehlo.reduce", "stablehlo.reduce_window", "stablehlo.scatter")
# Others choose one of their operands, which is exact.
_ACCUMULATE = ("stablehlo.add", "stablehlo.multiply")


def accumulate_wide(module: ir.Module) -> ir.Module:
    """Surround each accumulating reduction of 16-bit floats by conversions to float32 and back."""
    for op in operations(module, *_REDUCTIONS):
        if all(_narrow(result) for result in op.results) and _accumulates(op):
            _widen(op.operation)
    return module


def _narrow(value: ir.Value) -> bool:
    return value.type.element_type in (ir.BF16Type.get(), ir.F16Type.get())


def _accumulates(op: ir.OpView) -> bool:
    """Whether the body is one addition or product of its two arguments."""
    body = list(op.operation.regions[0].blocks[0].operations)
    return len(body) == 2 and body[0].operation.name in _ACCUMULATE


def _widen(op: ir.Operation) -> None:
    back = [result.type for result in op.results]
    with ir.InsertionPoint(op), op.location:
        for index, value in enumerate(op.operands):
            if _narrow(value):  # a scatter's positions are not
                op.operands[index] = hlo.convert(_float32(value.type), value)
    block = op.regions[0].blocks[0]
    for value in (*op.results, *block.arguments, *block.operations[0].results):
        value.set_type(_float32(value.type))
    with ir.InsertionPoint.after(op), op.location:
        for result, kind in zip(op.results, back, strict=True):
            narrowed = hlo.convert(kind, result)
            result.replace_all_uses_except(narrowed, narrowed.owner.operation)


def _float32(kind: ir.Type) -> ir.Type:
    return ir.RankedTensorType.get(kind.shape, ir.F32Type.get())
