"""Collectives between the processes of a mesh, as calls of our FFI handlers.

XLA's CPU compiler takes a program of one partition and makes its collectives the identity. Here each
becomes a call that meets the other ranks when it runs (bridge/plugin/ffi/collectives.cc). The calls of a
program form a chain, so that every rank comes to them in the same order.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from bridge.compiler.module import main_function, operations
from bridge.compiler.placement import Placement
from bridge.errors import CompileError

PREFIX = "tt_tpu."
RANK = f"{PREFIX}rank"
# The handlers that meet other ranks.
TARGETS = frozenset(
    f"{PREFIX}{name}"
    for name in (
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ragged_all_to_all",
        "collective_permute", "collective_broadcast",
    )
)  # fmt: skip
_RAGGED = "ragged_all_to_all"
_REDUCERS = {
    "stablehlo.add": "sum", "stablehlo.multiply": "product", "stablehlo.minimum": "minimum",
    "stablehlo.maximum": "maximum", "stablehlo.and": "and", "stablehlo.or": "or", "stablehlo.xor": "xor",
}  # fmt: skip
# Of elements that fill whole bytes; a reduction knows fewer.
_MOVED = frozenset("i1 i8 i16 i32 i64 ui8 ui16 ui32 ui64 bf16 f16 f32 f64 f8E4M3FN f8E5M2 complex<f32> complex<f64>".split())
_REDUCED = _MOVED - {"f8E4M3FN", "f8E5M2"}
# Marks that leave the division of a program to a partitioner.
_SHARDINGS = ("mhlo.sharding", "sdy.sharding")

Groups = tuple[tuple[int, ...], ...]


def lower_collectives(module: ir.Module, placement: Placement) -> ir.Module:
    """Replace every collective.

    One whose groups hold one rank each is its operand. In a program of one device all others are left, for
    the fail-closed pass to name.

    Raises:
        CompileError: a reduction, an element type or a form of groups that is not supported.
    """
    _Lowering(placement).block(main_function(module).regions[0].blocks[0], None)
    return module


def refuse_shardings(module: ir.Module, placement: Placement) -> ir.Module:
    """Raise CompileError where a program of several devices expects a partitioner to divide it."""
    if placement.spread and (op := first_sharded(module)) is not None:
        raise CompileError(
            f"{op.operation.name} has a sharding: in a mesh of processes programs are divided by their author (torch's "
            "DTensor, collectives), not by a partitioner. Run it in one process"
        )
    return module


def first_sharded(module: ir.Module) -> ir.OpView | None:
    """The first operation that leaves the division of the program to a partitioner, None where its author divided it."""
    for op in operations(module):
        if op.operation.name.startswith("sdy.") or any(mark in op.attributes for mark in _SHARDINGS) or _is_sharded(op):
            return op
    return None


def count_collectives(module: ir.Module) -> int:
    """How many calls the module has that meet other ranks."""
    calls = operations(module, "stablehlo.custom_call")
    return sum(ir.StringAttr(call.attributes["call_target_name"]).value in TARGETS for call in calls)


def _is_sharded(op: ir.OpView) -> bool:
    if op.operation.name != "func.func":
        return False
    lists = (op.attributes[name] for name in ("arg_attrs", "res_attrs") if name in op.attributes)
    return any(mark in ir.DictAttr(attributes) for each in lists for attributes in ir.ArrayAttr(each) for mark in _SHARDINGS)


@dataclass
class _Lowering:
    """Goes through a program in the order of its operations, with the chain of its collectives in hand."""

    placement: Placement
    handlers: dict = field(init=False)

    def __post_init__(self):
        self.handlers = {
            "stablehlo.all_reduce": self._all_reduce,
            "stablehlo.all_gather": self._all_gather,
            "stablehlo.reduce_scatter": self._reduce_scatter,
            "stablehlo.all_to_all": self._all_to_all,
            "stablehlo.collective_permute": self._permute,
            "stablehlo.collective_broadcast": self._broadcast,
            "stablehlo.partition_id": self._id,
            "stablehlo.replica_id": self._id,
        }

    def block(self, block: ir.Block, chain: ir.Value | None) -> ir.Value | None:
        """Lower the operations of `block`; the chain after them, None where it has not begun."""
        for op in [child.operation.opview for child in block.operations]:
            handler = self.handlers.get(op.operation.name)
            if handler is None and _target(op) == _RAGGED:
                handler = self._ragged
            if handler is not None:
                chain = self._collective(op, handler, chain)
            elif op.operation.name in _WITH_REGIONS and self._has_collectives(op):
                chain = _WITH_REGIONS[op.operation.name](self, op, chain)
        return chain

    def _collective(self, op: ir.OpView, handler, chain: ir.Value | None) -> ir.Value | None:
        with ir.InsertionPoint(op), op.location:
            results = self._identity(op)
            if results is None:
                if not self.placement.spread:
                    return chain
                chain = chain if chain is not None else _start()
                results, chain = handler(op, chain)
        for old, new in zip(op.results, results, strict=True):
            old.replace_all_uses_with(new)
        op.operation.erase()
        return chain

    def _has_collectives(self, op: ir.OpView) -> bool:
        return any(inner.operation.name in self.handlers or _target(inner) == _RAGGED for inner in operations(op))

    # ---- Groups

    def _groups(self, op: ir.OpView) -> Groups:
        """The groups' members, as ranks."""
        name = op.operation.name
        numbers = _numbers(op)
        if "use_global_device_ids" in op.attributes or name == "stablehlo.custom_call":
            counted = self.placement.spread
        elif name in ("stablehlo.all_reduce", "stablehlo.all_gather", "stablehlo.reduce_scatter"):
            # Replicas, and of each all partitions where there is a channel: in a program of partitions all of them.
            if self.placement.partitions > 1 and _channel(op):
                return (self.placement.ranks,)
            counted = self.placement.replicas > 1
        else:
            counted = self.placement.partitions > 1 if _channel(op) else self.placement.replicas > 1
        if not counted:
            # Members are counted in the dimension that has one: everyone is alone.
            return tuple((rank,) for rank in self.placement.ranks)
        if not numbers:
            return (self.placement.ranks,)
        return tuple(tuple(self._rank(op, number) for number in group) for group in numbers)

    def _rank(self, op: ir.OpView, number: int) -> int:
        if not 0 <= number < len(self.placement.ranks):
            raise CompileError(f"{op.operation.name} names device {number} of {len(self.placement.ranks)}")
        return self.placement.ranks[number]

    def _identity(self, op: ir.OpView) -> list[ir.Value] | None:
        """The operands, if every group holds one rank; None otherwise."""
        name = op.operation.name
        if name in ("stablehlo.partition_id", "stablehlo.replica_id"):
            return None
        if name == "stablehlo.collective_permute":
            own = [[rank, rank] for rank in range(len(self.placement.ranks))]
            return list(op.operands) if sorted(_pairs(op)) == own else None
        if name == "stablehlo.custom_call":
            return None
        sizes = {len(group) for group in self._groups(op)} if self.placement.spread else {len(g) for g in _numbers(op)}
        if sizes != {1} or [v.type for v in op.operands] != [v.type for v in op.results]:
            return None
        return list(op.operands)

    def _flat(self, op: ir.OpView) -> dict[str, ir.Attribute]:
        """The groups as attributes; StableHLO has them all of one size."""
        groups = self._groups(op)
        return {"groups": _int64s([rank for group in groups for rank in group]), "group_size": _int64(len(groups[0]))}

    # ---- One method an operation: (operation, chain) to (results, chain)

    def _all_reduce(self, op, chain):
        attributes = self._flat(op) | {"reduction": ir.StringAttr.get(_reducer(op))}
        return _each(op, chain, lambda x, y, c: _call("all_reduce", [x], y, c, attributes, _REDUCED))

    def _all_gather(self, op, chain):
        dimension = ir.IntegerAttr(op.attributes["all_gather_dim"]).value
        groups = self._flat(op)

        def gather(x, y, c):
            rows = math.prod(ir.ShapedType(x.type).shape[:dimension])
            return _call("all_gather", [x], y, c, groups | {"rows": _int64(rows)})

        return _each(op, chain, gather)

    def _reduce_scatter(self, op, chain):
        dimension = ir.IntegerAttr(op.attributes["scatter_dimension"]).value
        rows = math.prod(ir.ShapedType(op.operands[0].type).shape[:dimension])
        attributes = self._flat(op) | {"rows": _int64(rows), "reduction": ir.StringAttr.get(_reducer(op))}
        return _each(op, chain, lambda x, y, c: _call("reduce_scatter", [x], y, c, attributes, _REDUCED))

    def _all_to_all(self, op, chain):
        count = len(self._groups(op)[0])
        split, concat = (ir.IntegerAttr(op.attributes[f"{name}_dimension"]).value for name in ("split", "concat"))
        groups = self._flat(op)
        return _each(op, chain, lambda x, y, c: _exchange(x, y, c, groups, split, concat, count))

    def _ragged(self, op, chain):
        x, output, input_offsets, send_sizes, output_offsets, _ = op.operands
        if len(self._groups(op)[0]) != ir.ShapedType(send_sizes.type).shape[0]:
            raise CompileError("ragged_all_to_all takes one slice for each rank of a group, not several")
        operands = [x, output, input_offsets, send_sizes, output_offsets]
        result, chain = _call("ragged_all_to_all", operands, op.results[0].type, chain, self._flat(op))
        return [result], chain

    def _permute(self, op, chain):
        pairs = _pairs(op)
        counted = self.placement.partitions > 1 if _channel(op) else self.placement.replicas > 1
        if not counted:
            pairs = [[number, number] for number in range(len(self.placement.ranks))] if pairs == [[0, 0]] else []
        for side in (0, 1):
            if len({pair[side] for pair in pairs}) != len(pairs):
                raise CompileError(f"stablehlo.collective_permute: a device is twice a {('source', 'target')[side]} in {pairs}")
        ranks = [[self._rank(op, number) for number in pair] for pair in pairs]
        flat = [rank for pair in ranks for rank in pair]
        attributes = {"members": _int64s(sorted(set(flat))), "pairs": _int64s(flat)}
        return _each(op, chain, lambda x, y, c: _call("collective_permute", [x], y, c, attributes))

    def _broadcast(self, op, chain):
        groups = self._flat(op)
        return _each(op, chain, lambda x, y, c: _call("collective_broadcast", [x], y, c, groups))

    def _id(self, op, chain):
        partition = op.operation.name == "stablehlo.partition_id"
        count = self.placement.partitions if partition else self.placement.replicas
        kind = op.results[0].type
        if count == 1:
            return [hlo.constant(ir.DenseElementsAttr.get_splat(kind, ir.IntegerAttr.get(ir.ShapedType(kind).element_type, 0)))], chain
        order = {"order": _int64s(self.placement.ranks)}
        call = hlo.custom_call([kind], [], RANK, **_typed(order))
        return [_result(call)], chain

    # ---- Operations with regions: the chain goes in, through and out again

    def _while(self, op, chain):
        """Carries the chain as one more value of the loop."""
        condition, body = (region.blocks[0] for region in op.regions)
        if any(self._has_collectives(inner.operation.opview) for inner in condition.operations):
            raise CompileError("a collective in the condition of a loop is not supported: compute it in the body")
        with ir.InsertionPoint(op), op.location:
            chain = chain if chain is not None else _start()
            loop = ir.Operation.create(
                "stablehlo.while", results=[*(r.type for r in op.results), chain.type],
                operands=[*op.operands, chain], regions=2,
            )  # fmt: skip
        for source, region in zip((condition, body), loop.regions, strict=True):
            source.append_to(region)
            region.blocks[0].add_argument(chain.type, op.location)
        inner = loop.regions[1].blocks[0]
        _return_also(inner, self.block(inner, inner.arguments[len(inner.arguments) - 1]))
        return _replace(op, loop)

    def _branches(self, op, chain):
        """Each branch continues the chain."""
        with ir.InsertionPoint(op), op.location:
            chain = chain if chain is not None else _start()
            branch = ir.Operation.create(
                op.operation.name, results=[*(r.type for r in op.results), chain.type], operands=list(op.operands),
                regions=len(op.regions), attributes={a.name: a.attr for a in op.attributes},
            )  # fmt: skip
        for source, region in zip(op.regions, branch.regions, strict=True):
            source.blocks[0].append_to(region)
            _return_also(region.blocks[0], self.block(region.blocks[0], chain))
        return _replace(op, branch)


_WITH_REGIONS = {"stablehlo.while": _Lowering._while, "stablehlo.case": _Lowering._branches, "stablehlo.if": _Lowering._branches}


def _return_also(block: ir.Block, value: ir.Value) -> None:
    old = block.operations[len(block.operations) - 1]
    with ir.InsertionPoint(old), old.location:
        hlo.return_([*old.operands, value])
    old.operation.erase()


def _replace(op: ir.OpView, new: ir.Operation) -> ir.Value:
    """Put `new` in the place of `op`; its last result, which `op` has not, is the chain."""
    *results, chain = new.results
    for old, value in zip(op.results, results, strict=True):
        old.replace_all_uses_with(value)
    op.operation.erase()
    return chain


def _exchange(x: ir.Value, result: ir.Type, chain: ir.Value, groups: dict, split: int, concat: int, count: int):
    """all_to_all with the parts in front, as the handler wants them."""
    shape = ir.ShapedType(x.type).shape
    parts = [*shape[:split], count, shape[split] // count, *shape[split + 1 :]]
    rest = [axis for axis in range(len(parts)) if axis != split]
    x = _transposed(_shaped(x, parts), [split, *rest])
    y, chain = _call("all_to_all", [x], x.type, chain, groups)
    back = list(range(1, len(parts)))
    back.insert(concat, 0)
    return _shaped(_transposed(y, back), ir.ShapedType(result).shape), chain


def _transposed(value: ir.Value, order: Sequence[int]) -> ir.Value:
    return value if list(order) == sorted(order) else hlo.transpose(value, list(order))


def _shaped(value: ir.Value, shape: Sequence[int]) -> ir.Value:
    kind = ir.RankedTensorType.get(shape, ir.ShapedType(value.type).element_type)
    return value if value.type == kind else hlo.reshape(kind, value)


def _each(op: ir.OpView, chain: ir.Value, lower) -> tuple[list[ir.Value], ir.Value]:
    """Lower a collective of several operands as one after the other."""
    results = []
    for operand, result in zip(op.operands, op.results, strict=True):
        value, chain = lower(operand, result.type, chain)
        results.append(value)
    return results, chain


def _call(name, operands, result, chain, attributes, elements=_MOVED) -> tuple[ir.Value, ir.Value]:
    """A call of a handler: (result, chain)."""
    kind = ir.ShapedType(operands[0].type)
    if not kind.has_static_shape or str(kind.element_type) not in elements:
        raise CompileError(f"{name} of {operands[0].type} is not supported: use one of {', '.join(sorted(elements))}")
    if ir.ShapedType(result).element_type != kind.element_type:
        raise CompileError(f"{name} from {operands[0].type} to {result}: the element type must stay the same")
    operands = [*operands, chain]
    call = hlo.custom_call(
        [result, chain.type], operands, f"{PREFIX}{name}", has_side_effect=True,
        operand_layouts=_row_major(value.type for value in operands),
        result_layouts=_row_major((result, chain.type)), **_typed(attributes),
    )  # fmt: skip
    value, after = call
    return value, after


def _typed(attributes: dict[str, ir.Attribute]) -> dict:
    version = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4)
    return {"api_version": version, "backend_config": ir.DictAttr.get(attributes)}


def _row_major(kinds: Iterable[ir.Type]) -> ir.ArrayAttr:
    """A custom call may else get any layout."""
    index = ir.IndexType.get()

    def order(rank: int) -> ir.Attribute:
        return ir.DenseIntElementsAttr.get(np.arange(rank - 1, -1, -1, dtype=np.int64), type=index)

    return ir.ArrayAttr.get([order(ir.ShapedType(kind).rank) for kind in kinds])


def _start() -> ir.Value:
    """The value with which a chain begins; only that it is passed on counts."""
    return hlo.constant(ir.DenseElementsAttr.get(np.zeros((), np.int32)))


def _result(value) -> ir.Value:
    return value.result if isinstance(value, ir.OpView) else value


def _reducer(op: ir.OpView) -> str:
    """The reduction that a region computes.

    Raises:
        CompileError: it is not one operation of both arguments.
    """
    block = op.regions[0].blocks[0]
    body = [inner.operation for inner in block.operations]
    arguments = list(block.arguments)
    if len(body) == 2 and body[0].name in _REDUCERS and list(body[1].operands) == [body[0].results[0]]:
        if list(body[0].operands) in (arguments, arguments[::-1]):
            return _REDUCERS[body[0].name]
    names = ", ".join(inner.name.removeprefix("stablehlo.") for inner in body[:-1]) or "nothing"
    raise CompileError(
        f"{op.operation.name} {op.operands[0].type} reduces by ({names}), which is not one of "
        f"{', '.join(_REDUCERS.values())}: gather the arrays and reduce them in the program"
    )


def _target(op: ir.OpView) -> str:
    if op.operation.name != "stablehlo.custom_call":
        return ""
    return ir.StringAttr(op.attributes["call_target_name"]).value


def _numbers(op: ir.OpView) -> list[list[int]]:
    """replica_groups as they are written."""
    holder = op.attributes
    if op.operation.name == "stablehlo.custom_call":
        holder = ir.DictAttr(op.attributes["backend_config" if "backend_config" in op.attributes else "mhlo.backend_config"])
    return _table(holder["replica_groups"]) if "replica_groups" in holder else []


def _pairs(op: ir.OpView) -> list[list[int]]:
    return _table(op.attributes["source_target_pairs"])


def _table(attribute: ir.Attribute) -> list[list[int]]:
    rows, columns = ir.ShapedType(ir.DenseIntElementsAttr(attribute).type).shape
    flat = list(ir.DenseIntElementsAttr(attribute))
    return [flat[row * columns : (row + 1) * columns] for row in range(rows)]


def _channel(op: ir.OpView) -> bool:
    """Whether the operation has a channel, which makes its numbers those of partitions."""
    if "channel_handle" not in op.attributes:
        return False
    return hlo.ChannelHandle(op.attributes["channel_handle"]).handle > 0


def _int64(value: int) -> ir.Attribute:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)


def _int64s(values: Sequence[int]) -> ir.Attribute:
    return ir.DenseI64ArrayAttr.get(list(values))
