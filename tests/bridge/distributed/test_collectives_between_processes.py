"""Every collective, on real processes, against numpy."""

import numpy as np
import pytest
from collective_cases import CHANNEL, Case, kind, program, table

PAIR = ((0, 1),)
FOUR = ((0, 1, 2, 3),)


def run_case(chip, case: Case, seed: int):
    """On each rank: run the case, compare with numpy."""
    inputs = case.inputs(chip.world, seed)
    (result,) = chip.run(program([case]), inputs[chip.rank])
    np.testing.assert_array_equal(result, case.expected(inputs)[chip.rank])


REDUCTIONS = [
    (reduction, element)
    for element in ("f32", "bf16", "f16", "f64", "i8", "i16", "i32", "i64", "ui8", "ui16", "ui32", "ui64", "i1")
    for reduction in ("sum", "product", "minimum", "maximum", "and", "or", "xor")
    if reduction not in ("and", "or", "xor") or "f" not in element
]


@pytest.mark.parametrize(("reduction", "element"), REDUCTIONS)
def test_all_reduce(meshes, reduction, element):
    """Every reduction of every element type."""
    meshes(2).run(run_case, case=Case("all_reduce", (5, 7), element, PAIR, reduction), seed=1)


@pytest.mark.parametrize("element", ["complex<f32>", "complex<f64>"])
def test_a_sum_of_complex_numbers(meshes, element):
    """Complex numbers are summed too."""
    meshes(2).run(run_case, case=Case("all_reduce", (9,), element, PAIR), seed=1)


@pytest.mark.parametrize("count", [0, 1, 8191, 8192, 8193, 262_144, 262_147, 1_000_003])
@pytest.mark.parametrize("world", [2, 4])
def test_all_reduce_of_every_size(meshes, world, count):
    """From nothing to several buffers, at and beside the limits of one way and the other."""
    case = Case("all_reduce", (count,), "f32", (tuple(range(world)),))
    meshes(world).run(run_case, case=case, seed=count)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("shape", [(8, 3, 4), (8, 1000, 500)])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_along_every_axis(meshes, op, axis, shape, world):
    """all_gather and reduce_scatter along each axis, in one buffer and in many."""
    shape = tuple(size * world if i == axis and op == "reduce_scatter" else size for i, size in enumerate(shape))
    meshes(world).run(run_case, case=Case(op, shape, "bf16", (tuple(range(world)),), axis=axis), seed=axis)


@pytest.mark.parametrize(("split", "concat"), [(0, 0), (0, 1), (1, 0), (2, 1), (2, 2)])
@pytest.mark.parametrize("scale", [1, 100])
def test_all_to_all(meshes, split, concat, scale):
    """Any axis is split and any one concatenated."""
    meshes(4).run(run_case, case=Case("all_to_all", (8, 4 * scale, 12 * scale), "i32", FOUR, axis=split, concat=concat), seed=2)


@pytest.mark.parametrize("element", ["f32", "bf16", "i1", "i8", "complex<f32>"])
def test_data_of_every_kind_moves(meshes, element):
    """Elements of one to eight bytes arrive as they were."""
    mesh = meshes(2)
    for op in ("all_gather", "all_to_all", "collective_broadcast"):
        mesh.run(run_case, case=Case(op, (6, 5), element, PAIR), seed=3)


@pytest.mark.parametrize("pairs", [((0, 1), (1, 2), (2, 3), (3, 0)), ((0, 3), (3, 0)), ((2, 1),), ((1, 1), (0, 2))])
@pytest.mark.parametrize("count", [3, 600_000])
def test_collective_permute(meshes, pairs, count):
    """Rings, swaps and single messages; a rank that gets nothing has zeros."""
    meshes(4).run(run_case, case=Case("collective_permute", (count,), "f32", pairs=pairs), seed=4)


@pytest.mark.parametrize("groups", [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((3, 0), (2, 1)), ((2, 0, 3, 1),)])
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_broadcast"])
def test_groups(meshes, op, groups):
    """Any division into groups, in any order of their members."""
    meshes(4).run(run_case, case=Case(op, (8, 3), "i32", groups), seed=5)


def run_cases(chip, cases, seed: int):
    """One case after the other."""
    for case in cases:
        run_case(chip, case, seed)


def test_only_the_members_need_to_come(meshes):
    """A group's collectives run without the ranks that are in other groups."""
    groups = ((0, 3), (1, 2))
    cases = [Case("all_reduce", (100_000,), "f32", groups), Case("all_gather", (4, 5), "f32", groups, axis=1)]
    meshes(4).run(run_cases, [0, 3], cases=cases, seed=7)


def run_ids(chip, replicas: int):
    """partition_id and replica_id."""
    text = """module @ids { func.func public @main() -> (tensor<ui32>, tensor<ui32>) {
      %p = stablehlo.partition_id : tensor<ui32> %r = stablehlo.replica_id : tensor<ui32>
      return %p, %r : tensor<ui32>, tensor<ui32> } }"""
    partition, replica = (int(value) for value in chip.run(chip.compile(text, replicas)))
    assert (partition, replica) == ((chip.rank, 0) if replicas == 1 else (0, chip.rank))


@pytest.mark.parametrize("replicas", [1, 4])
def test_ids_are_known_when_the_program_runs(meshes, replicas):
    """A rank finds its number in a program that is the same on all of them."""
    meshes(4).run(run_ids, replicas=replicas)


def run_replicas(chip):
    """A program of replicas, without a channel, and one whose replicas are one."""
    body = " ({ ^bb0(%a: tensor<f32>, %b: tensor<f32>): %c = stablehlo.add %a, %b : tensor<f32> stablehlo.return %c : tensor<f32> })"
    text = f"""module @replicas {{ func.func public @main(%x: tensor<2xf32>) -> tensor<2xf32> {{
      %y = "stablehlo.all_reduce"(%x) <{{replica_groups = %s}}>{body} : (tensor<2xf32>) -> tensor<2xf32>
      return %y : tensor<2xf32> }} }}"""
    x = np.array([chip.rank, 1], np.float32)
    (summed,) = chip.run(chip.compile(text.replace("%s", table(FOUR)), 4), x)
    np.testing.assert_array_equal(summed, [6, 4])
    (own,) = chip.run(text.replace("%s", table(((0,),))), x)
    np.testing.assert_array_equal(own, x)


def test_replicas_and_partitions_are_told_apart(meshes):
    """Without a channel groups are of replicas: all ranks of a program of four, each alone in one of one."""
    meshes(4).run(run_replicas)


def run_ragged(chip, scale: int):
    """Rank i sends (i + j) % 3 rows to rank j, placed behind those of lower ranks."""
    world, rank, width = chip.world, chip.rank, 5
    size = lambda source, target: (source + target) % 3 * scale  # noqa: E731
    rows = 3 * world * scale
    inputs = [np.arange(rows * width, dtype=np.float32).reshape(rows, width) + 1000 * source for source in range(world)]
    sends = [size(rank, peer) for peer in range(world)]
    starts = [sum(sends[:peer]) for peer in range(world)]
    targets = [sum(size(source, peer) for source in range(rank)) for peer in range(world)]
    expected = np.full((rows, width), -1, np.float32)
    at = 0
    for source in range(world):
        begin = sum(size(source, peer) for peer in range(rank))
        expected[at : at + size(source, rank)] = inputs[source][begin : begin + size(source, rank)]
        at += size(source, rank)
    array, numbers = kind((rows, width), "f32"), kind((world,), "i32")
    text = f"""module @ragged {{ func.func public @main(%x: {array}, %y: {array}, %a: {numbers}, %b: {numbers},
      %c: {numbers}, %d: {numbers}) -> {array} {{
      %z = stablehlo.custom_call @ragged_all_to_all(%x, %y, %a, %b, %c, %d) {{api_version = 4 : i32, backend_config =
        {{channel_id = 1 : i64, replica_groups = {table((tuple(range(world)),))}}}}} :
        ({array}, {array}, {numbers}, {numbers}, {numbers}, {numbers}) -> {array}
      return %z : {array} }} }}"""
    received = [size(source, rank) for source in range(world)]
    numbers = [np.array(values, np.int32) for values in (starts, sends, targets, received)]
    (result,) = chip.run(text, inputs[rank], np.full((rows, width), -1, np.float32), *numbers)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("scale", [1, 9000])
def test_ragged_all_to_all(meshes, scale):
    """Slices of different lengths, none among them, go where the sender says; other rows stay."""
    meshes(4).run(run_ragged, scale=scale)


def run_loop(chip):
    """Ten turns of a loop that sums over all ranks, with a collective before and after it."""
    scalar, array = "tensor<f32>", "tensor<3xf32>"
    reduce = Case("all_reduce", (3,), "f32", (tuple(range(chip.world)),))
    text = f"""module @loop {{ func.func public @main(%x: {array}) -> ({array}, {array}, {array}) {{
      {reduce.text("%x", "%before")}
      %zero = stablehlo.constant dense<0> : tensor<i32> %one = stablehlo.constant dense<1> : tensor<i32>
      %ten = stablehlo.constant dense<10> : tensor<i32> %half = stablehlo.constant dense<0.5> : {scalar}
      %halves = stablehlo.broadcast_in_dim %half, dims = [] : ({scalar}) -> {array}
      %n, %sum = stablehlo.while(%i = %zero, %y = %x) : tensor<i32>, {array} cond {{
        %more = stablehlo.compare LT, %i, %ten : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %more : tensor<i1> }} do {{
        {reduce.text("%y", "%s")}
        %h = stablehlo.multiply %s, %halves : {array} %j = stablehlo.add %i, %one : tensor<i32>
        stablehlo.return %j, %h : tensor<i32>, {array} }}
      {reduce.text("%sum", "%after")}
      return %before, %sum, %after : {array}, {array}, {array} }} }}"""
    x = np.arange(3, dtype=np.float32)
    before, inside, after = chip.run(text, x)
    np.testing.assert_array_equal(before, x * chip.world)
    np.testing.assert_array_equal(inside, x * (chip.world / 2) ** 10)
    np.testing.assert_array_equal(after, inside * chip.world)


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_in_a_loop(meshes, world):
    """A loop's body may hold collectives; they keep their place among those outside."""
    meshes(world).run(run_loop)


def run_branches(chip, taken: int):
    """A collective in each branch of a conditional; all ranks take the same one."""
    reduce, gather = (Case(op, (2,), "f32", (tuple(range(chip.world)),)) for op in ("all_reduce", "all_gather"))
    text = f"""module @branches {{ func.func public @main(%k: tensor<i32>, %x: tensor<2xf32>) -> tensor<2xf32> {{
      %y = "stablehlo.case"(%k) ({{ {reduce.text("%x", "%s")} stablehlo.return %s : tensor<2xf32> }}, {{
        {gather.text("%x", "%g")} %f = stablehlo.slice %g [2:4] : ({kind(gather.result_shape, "f32")}) -> tensor<2xf32>
        stablehlo.return %f : tensor<2xf32> }}) : (tensor<i32>) -> tensor<2xf32>
      return %y : tensor<2xf32> }} }}"""
    (result,) = chip.run(text, np.int32(taken), np.full(2, chip.rank + 1, np.float32))
    np.testing.assert_array_equal(result, [3, 3] if taken == 0 else [2, 2])


@pytest.mark.parametrize("taken", [0, 1])
def test_collectives_in_branches(meshes, taken):
    """The branch that is taken runs its collective."""
    meshes(2).run(run_branches, taken=taken)


def run_rounding(chip):
    """A sum in bfloat16 whose partial sums would lose the small numbers: result as bits."""
    value = [256.0, 1.0, 1.0, 1.0][chip.rank]
    import ml_dtypes

    sums = []
    for count in (8, 100_000):  # at once, and in parts
        case = Case("all_reduce", (count,), "bf16", (tuple(range(chip.world)),))
        (result,) = chip.run(program([case]), np.full(count, value, ml_dtypes.bfloat16))
        assert len(set(result.tolist())) == 1
        sums.append(float(result[0]))
    return sums


def test_bfloat16_is_summed_in_float(meshes):
    """256 + 1 + 1 + 1 is 260 in bfloat16 (259 rounded once), and 256 only if each sum is rounded; on all ranks the same."""
    assert meshes(4).run(run_rounding) == [[260.0, 260.0]] * 4


def run_random_floats(chip, times: int):
    """The bytes of sums of random floats."""
    x = np.random.default_rng(chip.rank).standard_normal(300_000).astype(np.float32)
    case = Case("all_reduce", x.shape, "f32", (tuple(range(chip.world)),))
    return {chip.run(program([case]), x)[0].tobytes() for _ in range(times)}


def test_sums_have_the_same_bits_everywhere(meshes):
    """Rounding is the same on every rank and in every run."""
    found = set().union(*meshes(4).run(run_random_floats, times=3))
    assert len(found) == 1


def run_nan(chip):
    """A maximum in which one rank has a NaN."""
    x = np.array([1, np.nan if chip.rank == 0 else 2, np.nan if chip.rank == 1 else 3], np.float32)
    (result,) = chip.run(program([Case("all_reduce", (3,), "f32", PAIR, "maximum")]), x)
    return result.tolist()


def test_nan_wins(meshes):
    """A NaN of any rank is the maximum, as StableHLO has it."""
    for result in meshes(2).run(run_nan):
        assert result[0] == 1 and np.isnan(result[1:]).all()


def run_one_device(chip):
    """A program for one device does not meet anybody."""
    import pypjrt

    loaded = chip.client.compile(program([Case("all_reduce", (2,), "f32", ((0,),))]), options=pypjrt.CompileOptions())
    (result,) = chip.run(loaded, np.ones(2, np.float32))
    assert result.tolist() == [1, 1]
    try:
        chip.client.compile(program([Case("all_reduce", (2,), "f32", PAIR)]), options=pypjrt.CompileOptions())
    except pypjrt.errors.PjrtError as error:
        return str(error)


def test_a_program_for_one_device_in_a_mesh(meshes):
    """It runs on its rank alone; a collective in it is refused."""
    assert all("all_reduce" in message for message in meshes(2).run(run_one_device))


def run_permuted(chip):
    """A program whose partitions are counted from the last rank."""
    from pypjrt.compile_options import _bytes_field, _int_field

    devices = b"".join(_bytes_field(3, _int_field(1, id)) for id in reversed(range(chip.world)))
    assignment = _int_field(1, 1) + _int_field(2, chip.world) + devices
    text = f"""module @permuted {{ func.func public @main(%x: tensor<1xf32>) -> (tensor<ui32>, tensor<1xf32>) {{
      %p = stablehlo.partition_id : tensor<ui32>
      %y = "stablehlo.collective_broadcast"(%x) <{{{CHANNEL}, replica_groups = {table(FOUR)}}}> : (tensor<1xf32>) -> tensor<1xf32>
      return %p, %y : tensor<ui32>, tensor<1xf32> }} }}"""
    number, root = chip.run(chip.compile(text, assignment=assignment), np.array([chip.rank], np.float32))
    return int(number), float(root[0])


def test_a_device_assignment_that_is_not_in_order(meshes):
    """Numbers in a program go through its device assignment to ranks."""
    assert meshes(4).run(run_permuted) == [(3, 3.0), (2, 3.0), (1, 3.0), (0, 3.0)]


def run_serialized(chip, serialized: bytes | None):
    """Serialize a program with collectives, or run one that another rank has serialized."""
    case = Case("all_reduce", (4,), "f32", (tuple(range(chip.world)),))
    if serialized is None:
        return chip.compile(program([case])).serialize()
    with chip.client.deserialize_executable(serialized) as loaded:
        (result,) = chip.run(loaded, np.full(4, chip.rank, np.float32))
    np.testing.assert_array_equal(result, np.full(4, sum(range(chip.world))))


def test_a_serialized_program_fits_every_rank(meshes):
    """What one rank compiled runs on all of them: nothing of a rank is in it."""
    (serialized,) = meshes(4).run(run_serialized, ranks=[2], serialized=None)
    meshes(4).run(run_serialized, serialized=serialized)
