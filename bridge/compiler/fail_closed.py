"""Refuses what no pass and no inner plugin gives a meaning to.

XLA's CPU compiler turns a collective of one partition into the identity, and an unknown
custom call fails only when it runs, if at all: a wrong number is worse than an error, so
what is left after all other passes is named here and the program is not compiled.
"""

from jaxlib.mlir import ir

from bridge.compiler.module import operations
from bridge.errors import CompileError

COLLECTIVES = frozenset(
    f"stablehlo.{name}"
    for name in (
        "all_gather",
        "all_reduce",
        "all_to_all",
        "collective_broadcast",
        "collective_permute",
        "reduce_scatter",
        "send",
        "recv",
        "partition_id",
        "replica_id",
    )
)

# Annotations for the partitioner, as are all of Shardy's; with one partition they mean nothing.
ANNOTATIONS = frozenset(
    ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement", "LayoutConstraint")
)
SHARDY = "xla.sdy."


def fail_closed(module: ir.Module, known: frozenset[str], collectives: bool = False) -> ir.Module:
    """Raise CompileError for the first collective or unknown custom call.

    Args:
        module: the program after all other passes.
        known: custom call targets that the inner plugin handles, ours included.
        collectives: whether the inner plugin runs collectives between the program's devices itself.
    """
    for op in operations(module):
        if op.operation.name in COLLECTIVES and not collectives:
            raise CompileError(_collective(op))
        if op.operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(op.attributes["call_target_name"]).value
            if target not in known and target not in ANNOTATIONS and not target.startswith(SHARDY):
                raise CompileError(_custom_call(op, target))
    return module


def signature(op: ir.OpView) -> str:
    """Operand and result types, "(tensor<2x2xf32>) -> tensor<2xf32>"."""
    operands = ", ".join(str(value.type) for value in op.operands)
    results = ", ".join(str(value.type) for value in op.results)
    return f"({operands}) -> {results}"


def _collective(op: ir.OpView) -> str:
    return (
        f"{op.operation.name} {signature(op)} cannot run: this chip is not part of a mesh. Run on one chip "
        "(world size 1, --tp-size 1), or start one process for each chip with torchrun or tt-tpu run."
    )


def _custom_call(op: ir.OpView, target: str) -> str:
    if target == "tpu_custom_call":
        name = op.attributes["kernel_name"] if "kernel_name" in op.attributes else None
        kernel = ir.StringAttr(name).value if name is not None else "a kernel"
        return (
            f"tpu_custom_call {kernel!r} {signature(op)} is machine code for Google's TPU and has no replacement. "
            "Use the operation's plain PyTorch or JAX form, or register a replacement in kernels_replacements."
        )
    return (
        f"custom call {target!r} {signature(op)} is unknown to this chip. "
        "Use an operation that lowers to StableHLO, or add a pass for it in bridge/compiler."
    )
