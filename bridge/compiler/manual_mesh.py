"""A program of one rank, presented as libtt wants a program of a mesh.

libtt finds a program's mesh, and so the way of its collectives, in Shardy's terms alone: arguments and results are
the ranks' one after the other, and what a rank does with its own is the body of a manual computation.
"""

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, sdy

from bridge.compiler.collectives import first_sharded
from bridge.compiler.fail_closed import COLLECTIVES
from bridge.compiler.module import main_function, operations
from bridge.compiler.placement import Placement
from bridge.errors import CompileError

_MESH, _AXIS = "mesh", "chips"


def compute_manually(module: ir.Module, placement: Placement) -> ir.Module:
    """Make the body of @main a manual computation over the mesh's chips.

    Left as it is: a program of one partition, and one that names its mesh and shardings itself.

    Raises:
        CompileError: a collective of replicas, whose numbers mean nothing in a mesh of partitions.
    """
    if placement.replicas > 1 and (op := next(operations(module, *COLLECTIVES), None)) is not None:
        raise CompileError(f"{op.operation.name} in a program of replicas does not go to this chip: divide it into partitions")
    if placement.partitions == 1 or first_sharded(module) is not None:
        return module
    numbers = ir.IntegerType.get_signless(32)
    for name, value in (("mhlo.num_partitions", placement.partitions), ("mhlo.num_replicas", 1)):
        module.operation.attributes[name] = ir.IntegerAttr.get(numbers, value)
    mesh = sdy.MeshAttr.get([sdy.MeshAxisAttr.get(_AXIS, placement.partitions)])
    with ir.InsertionPoint.at_block_begin(module.body):
        sdy.MeshOp(_MESH, mesh)
    _wrap(main_function(module), placement.partitions)
    return module


def _whole(kind: ir.Type, size: int) -> ir.Type:
    """The type of all ranks' values of `kind` together; scalars are the same on all."""
    tensor = ir.RankedTensorType(kind)
    if tensor.rank == 0:
        return kind
    return ir.RankedTensorType.get([tensor.shape[0] * size, *tensor.shape[1:]], tensor.element_type)


def _sharding(kind: ir.Type) -> ir.Attribute:
    """Along the first dimension, where there is one."""
    along = [sdy.AxisRefAttr.get(_AXIS)]
    dimensions = [
        sdy.DimensionShardingAttr.get(along if dimension == 0 else [], is_closed=True)
        for dimension in range(ir.RankedTensorType(kind).rank)
    ]
    return sdy.TensorShardingAttr.get(_MESH, dimensions)


def _shardings(types: list[ir.Type]) -> ir.Attribute:
    return sdy.TensorShardingPerValueAttr.get([_sharding(kind) for kind in types])


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
