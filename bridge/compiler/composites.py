"""Replaces every `stablehlo.composite` and every call by the body of its function.

XLA's CPU compiler aborts on composites with regions (cumsum, what generate() uses), and
no inner plugin needs the grouping. With all calls opened, the later passes see one flat
function.
"""

from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs._jax_mlir_ext import inlined_func_call
from jaxlib.mlir.passmanager import PassManager

from bridge.compiler.module import operations

_CALLEE = {"stablehlo.composite": "decomposition", "func.call": "callee"}


def inline_composites(module: ir.Module) -> ir.Module:
    """Inline composites and calls, those inside of loops and of other composites too, and drop unused functions."""
    functions = ir.SymbolTable(module.operation)
    # Copies bring the calls of their originals along: go on until none is left in use.
    while calls := list(operations(functions["main"], *_CALLEE)):
        for call in calls:
            name = ir.FlatSymbolRefAttr(call.attributes[_CALLEE[call.operation.name]]).value
            with ir.InsertionPoint(call):
                values = inlined_func_call(functions[name].operation, list(call.operands), call.location)
            for old, new in zip(call.results, values, strict=True):
                old.replace_all_uses_with(new)
            call.erase()
    PassManager.parse("builtin.module(symbol-dce)", module.context).run(module.operation)
    return module
