"""Gives sorts a comparison that is false for equal elements, as XLA's CPU compiler needs it.

torch_tpu's unique sorts by "greater or equal". A TPU's sorting network takes that; std::sort, which
XLA's CPU runtime uses, then runs off the end of the array.
"""

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from bridge.compiler.module import operations, producer

_STRICT = {"GE": "GT", "LE": "LT"}


def make_sorts_strict(module: ir.Module) -> ir.Module:
    """Replace "or equal" in each sort whose order is one comparison; elements that are equal keep their order."""
    for sort in operations(module, "stablehlo.sort"):
        returned = list(sort.operation.regions[0].blocks[0].operations)[-1]
        compare = producer(returned.operands[0], "stablehlo.compare")
        if compare is None:
            continue
        direction = hlo.ComparisonDirectionAttr(compare.attributes["comparison_direction"]).value
        if direction in _STRICT:
            compare.operation.attributes["comparison_direction"] = hlo.ComparisonDirectionAttr.get(_STRICT[direction])
            sort.operation.attributes["is_stable"] = ir.BoolAttr.get(True)
    return module
