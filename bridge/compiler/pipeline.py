"""The ordered passes of each backend, and the one function that runs them.

A pass is a function from module to module in a file of its own. Order matters: composites
are opened first so that all others see plain operations, and the fail-closed pass is last
so that nothing slips past it.
"""

import functools
from dataclasses import dataclass

from jaxlib.mlir import ir

from bridge.compiler import collectives
from bridge.compiler import module as modules
from bridge.compiler.composites import inline_composites
from bridge.compiler.fail_closed import fail_closed
from bridge.compiler.manual_mesh import compute_manually
from bridge.compiler.matmul_forms import TARGET as MATMUL
from bridge.compiler.matmul_forms import use_own_matmul
from bridge.compiler.narrow_products import narrow_products
from bridge.compiler.placement import ALONE, Placement
from bridge.compiler.strict_sorts import make_sorts_strict
from bridge.compiler.tt_calls import LIBTT_CALLS, expand_composites, expand_tt_calls, spell_tt_calls
from bridge.compiler.wide_sums import accumulate_wide
from bridge.errors import CompileError

# Custom calls that XLA's CPU compiler gives a meaning to.
_XLA_CPU = frozenset(("TopK", "Qr", "ProductOfElementaryHouseholderReflectors", "Eigh"))
_LU = "LuDecomposition"
# Typed FFI handlers of bridge/plugin/ffi. Those of tt.* calls compute what bridge/emulator says, faster.
_OURS = frozenset(
    (
        MATMUL,
        _LU,
        "tt.paged_scaled_dot_product_attention_decode",
        "tt.chunked_scaled_dot_product_attention",
        "tt.paged_update_cache",
        "tt.paged_fill_cache",
    )
)

BACKENDS = ("emulated", "libtt")


@dataclass(frozen=True)
class Rewritten:
    """A program after the passes.

    Attributes:
        program: StableHLO portable artifact.
        name: the module's name.
        donated: indices of the entry's parameters whose buffers the program may reuse.
        collectives: how many calls meet other processes.
    """

    program: bytes
    name: str
    donated: tuple[int, ...]
    collectives: int = 0


def passes(backend: str, placement: Placement = ALONE) -> tuple[modules.Pass, ...]:
    """The passes for `backend` ("emulated" or "libtt") and `placement`, in the order in which they run."""
    if backend == "libtt":
        # Chips of a mesh have collectives of their own.
        refuse = functools.partial(fail_closed, known=LIBTT_CALLS, collectives=placement.spread)
        present = functools.partial(compute_manually, placement=placement)
        return (inline_composites, narrow_products, spell_tt_calls, present, refuse)
    if placement.here > 1:
        # XLA divides the program and has collectives between its devices; into calls of ours it cannot look.
        refuse = functools.partial(fail_closed, known=_XLA_CPU | {_LU}, collectives=True)
        return (expand_composites, inline_composites, expand_tt_calls, make_sorts_strict, accumulate_wide, refuse)
    return (
        expand_composites,
        inline_composites,
        functools.partial(collectives.refuse_shardings, placement=placement),
        functools.partial(collectives.lower_collectives, placement=placement),
        functools.partial(expand_tt_calls, handled=_OURS),
        narrow_products,
        use_own_matmul,
        make_sorts_strict,
        accumulate_wide,
        functools.partial(fail_closed, known=_XLA_CPU | _OURS | collectives.TARGETS | {collectives.RANK}),
    )


def rewrite(
    context: ir.Context, program: bytes, backend: str, version: str, placement: Placement = ALONE
) -> Rewritten:
    """Run the backend's passes over a StableHLO program.

    Args:
        context: from `module.make_context`.
        program: StableHLO portable artifact, MLIR bytecode or text.
        backend: "emulated" or "libtt".
        version: newest StableHLO version that the inner plugin reads, "1.17.0".
        placement: the devices of a mesh that run it.

    Raises:
        CompileError: the program cannot be read, or cannot run on this chip.
    """
    try:
        module = modules.parse(context, program)
        modules.main_function(module)
    except (ir.MLIRError, ValueError, KeyError) as error:
        raise CompileError(f"the program is not StableHLO with a function @main: {error}") from error
    with context, ir.Location.unknown():
        name, donated = _name(module), _donated(module)
        for run in passes(backend, placement):
            module = run(module)
        count = collectives.count_collectives(module)
        return Rewritten(modules.serialize(module, version), name, donated, count)


def _name(module: ir.Module) -> str:
    attributes = module.operation.attributes
    return ir.StringAttr(attributes["sym_name"]).value if "sym_name" in attributes else "main"


def _donated(module: ir.Module) -> tuple[int, ...]:
    attributes = modules.main_function(module).attributes
    if "arg_attrs" not in attributes:
        return ()
    marks = ("jax.buffer_donor", "tf.aliasing_output")
    return tuple(
        index
        for index, argument in enumerate(ir.ArrayAttr(attributes["arg_attrs"]))
        if any(mark in ir.DictAttr(argument) for mark in marks)
    )
