"""Reading, walking and writing StableHLO modules with jaxlib's MLIR bindings.

The passes share these few helpers; nothing of JAX itself is imported, so a worker
starts in a fraction of a second.
"""

from collections.abc import Callable, Iterator

from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, sdy
from jaxlib.mlir.dialects import stablehlo as hlo

Pass = Callable[[ir.Module], ir.Module]

# A portable artifact is MLIR bytecode whose producer string names StableHLO's version.
_BYTECODE = b"ML\xefR"
_ARTIFACT = b"StableHLO_v"


def make_context() -> ir.Context:
    """A context that knows StableHLO, CHLO, Shardy and the upstream dialects."""
    context = ir.Context()
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    for dialect in (hlo, chlo, sdy):
        dialect.register_dialect(context)
    return context


def parse(context: ir.Context, program: bytes) -> ir.Module:
    """Read a StableHLO portable artifact, MLIR bytecode or MLIR text; raises ir.MLIRError or ValueError."""
    if program.startswith(_BYTECODE) and _ARTIFACT in program[:64]:
        return hlo.deserialize_portable_artifact(context, program)
    return ir.Module.parse(program, context)


def serialize(module: ir.Module, version: str) -> bytes:
    """The module as a portable artifact of StableHLO `version` ("1.17.0") or jaxlib's, whichever is older.

    Shardy's operations, which have no versions, go along as they are.
    """
    version = hlo.get_smaller_version(version, hlo.get_current_version())
    sharded = any(op.operation.name.startswith("sdy.") for op in operations(module))
    return hlo.serialize_portable_artifact(module, version, allow_other_dialects=sharded)


def operations(root: ir.Module | ir.OpView, *names: str) -> Iterator[ir.OpView]:
    """Every operation under `root` of one of `names` (all of them when none is given), nested regions included.

    The list is complete before the first one is handed out, so that a pass may erase what it gets.
    """
    found = []

    def visit(op):
        if not names or op.name in names:
            found.append(op.opview)
        return ir.WalkResult.ADVANCE

    root.operation.walk(visit)
    return iter(found)


def producer(value: ir.Value, name: str) -> ir.OpView | None:
    """The operation that makes `value` if it is called `name`, else None."""
    owner = value.owner
    return owner.operation.opview if not isinstance(owner, ir.Block) and owner.operation.name == name else None


def main_function(module: ir.Module) -> ir.OpView:
    """The public entry `@main`; raises KeyError when the module has none."""
    return ir.SymbolTable(module.operation)["main"]
