"""Replaces every `stablehlo.composite` by its decomposition.

XLA's CPU compiler aborts on composites with regions (cumsum, what generate() uses), and
no inner plugin needs the grouping. All other calls are inlined as well, so that the later
passes see one flat function.
"""

from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from bridge.compiler.module import operations


def inline_composites(module: ir.Module) -> ir.Module:
    """Turn composites into calls of their decompositions, then inline every call."""
    for composite in operations(module, "stablehlo.composite"):
        call = ir.Operation.create(
            "func.call",
            results=[result.type for result in composite.results],
            operands=list(composite.operands),
            attributes={"callee": composite.attributes["decomposition"]},
            loc=composite.location,
            ip=ir.InsertionPoint(composite),
        )
        for old, new in zip(composite.results, call.results, strict=True):
            old.replace_all_uses_with(new)
        composite.erase()
    PassManager.parse("builtin.module(inline,symbol-dce)", module.context).run(module.operation)
    return module
