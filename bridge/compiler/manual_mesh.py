"""A program of one rank, presented as libtt wants a program of a mesh.

libtt finds a program's mesh, and so the way of its collectives, in Shardy's terms alone: arguments and results are
the ranks' one after the other, and what a rank does with its own is the body of a manual computation.
"""

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, sdy

from bridge.compiler.module import main_function, operations
from bridge.compiler.placement import Placement
from bridge.errors import CompileError

_MESH, _AXIS = "mesh", "chips"
# Collectives that count replicas unless they are told that their numbers are those of all devices.
_FLAGGED = frozenset(f"stablehlo.{name}" for name in ("all_reduce", "all_gather", "reduce_scatter"))
_CHANNELLED = frozenset(f"stablehlo.{name}" for name in ("all_to_all", "collective_permute", "collective_broadcast"))


def compute_manually(module: ir.Module, placement: Placement) -> ir.Module:
    """Make the body of @main a manual computation over the mesh's chips; a program of one device is left as it is.

    Raises:
        CompileError: a collective counts replicas in a way that a mesh of partitions has no word for.
    """
    if not placement.spread:
        return module
    for op in operations(module, *_FLAGGED, *_CHANNELLED):
        _count_partitions(op, placement)
    size = len(placement.ranks)
    numbers = ir.IntegerType.get_signless(32)
    for name, value in (("mhlo.num_partitions", size), ("mhlo.num_replicas", 1)):
        module.operation.attributes[name] = ir.IntegerAttr.get(numbers, value)
    mesh = sdy.MeshAttr.get([sdy.MeshAxisAttr.get(_AXIS, size)])
    with ir.InsertionPoint.at_block_begin(module.body):
        sdy.MeshOp(_MESH, mesh)
    _wrap(main_function(module), size)
    return module


def _count_partitions(op: ir.OpView, placement: Placement) -> None:
    """Give a collective of replicas the channel that makes it one of partitions, over the same devices."""
    if placement.replicas == 1 or "use_global_device_ids" in op.attributes:
        return
    if "channel_handle" in op.attributes or op.operation.name in _FLAGGED:
        raise CompileError(f"{op.operation.name} without use_global_device_ids, in a program of replicas, does not go to this chip")
    op.attributes["channel_handle"] = ir.Attribute.parse("#stablehlo.channel_handle<handle = 1, type = 1>")


def _whole(kind: ir.Type, size: int) -> ir.Type:
    """The type of all ranks' values of `kind` together; scalars are the same on all."""
    tensor = ir.RankedTensorType(kind)
    if tensor.rank == 0:
        return kind
    return ir.RankedTensorType.get([tensor.shape[0] * size, *tensor.shape[1:]], tensor.element_type)


def _shardings(types: list[ir.Type]) -> ir.Attribute:
    """Along the first dimension each."""
    each = []
    for kind in types:
        rank = ir.RankedTensorType(kind).rank
        dimensions = [sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(_AXIS)] if place == 0 else [], is_closed=True) for place in range(rank)]
        each.append(sdy.TensorShardingAttr.get(_MESH, dimensions))
    return sdy.TensorShardingPerValueAttr.get(each)


def _wrap(main: ir.OpView, size: int) -> None:
    outer = main.regions[0].blocks[0]
    body = [op.operation for op in outer.operations]
    end = body[-1]
    given, made = [argument.type for argument in outer.arguments], [value.type for value in end.operands]
    results = [_whole(kind, size) for kind in made]
    axes = sdy.ManualAxesAttr.get([ir.StringAttr.get(_AXIS)])
    with ir.InsertionPoint(end), end.location:
        manual = sdy.ManualComputationOp(results, list(outer.arguments), _shardings(given), _shardings(made), axes)
        inner = manual.regions[0].blocks.append(*given)
        for argument, own in zip(outer.arguments, inner.arguments, strict=True):
            argument.replace_all_uses_except(own, manual.operation)
            argument.set_type(_whole(argument.type, size))
        for op in body[:-1]:
            inner.append(op)
        with ir.InsertionPoint(inner):
            sdy.ReturnOp(list(end.operands))
        func.ReturnOp(list(manual.results))
    end.erase()
    main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get([a.type for a in outer.arguments], results))
