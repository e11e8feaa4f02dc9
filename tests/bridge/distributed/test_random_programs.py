"""Random programs of collectives, run by ranks that come at different times."""

import random
import time

import numpy as np
import pytest
from collective_cases import Case, program

_ELEMENTS = ("f32", "bf16", "f16", "f64", "i8", "i32", "i64", "ui8", "i1")
_REDUCTIONS = ("sum", "product", "minimum", "maximum")
_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute", "collective_broadcast")


def random_groups(choice: random.Random, world: int) -> tuple[tuple[int, ...], ...]:
    """A division of all ranks into groups of one size, in any order."""
    ranks = list(range(world))
    choice.shuffle(ranks)
    size = choice.choice([size for size in range(1, world + 1) if world % size == 0])
    return tuple(tuple(ranks[start : start + size]) for start in range(0, world, size))


def random_case(choice: random.Random, world: int) -> Case:
    """Any collective of any shape; one in ten is larger than a buffer."""
    op, element = choice.choice(_OPS), choice.choice(_ELEMENTS)
    shape = tuple(choice.randint(1, 6) for _ in range(choice.randint(1, 3)))
    if choice.random() < 0.1:
        shape = (*shape[:-1], choice.randint(50_000, 300_000))
    if op == "collective_permute":
        targets = choice.sample(range(world), world)
        pairs = tuple(pair for pair in enumerate(targets) if choice.random() < 0.8)
        return Case(op, shape, element, pairs=pairs or ((0, 0),))
    axis, concat = choice.randrange(len(shape)), choice.randrange(len(shape))
    groups = random_groups(choice, world)
    if op in ("reduce_scatter", "all_to_all"):
        shape = tuple(size * len(groups[0]) if i == axis else size for i, size in enumerate(shape))
    return Case(op, shape, element, groups, choice.choice(_REDUCTIONS), axis, concat)


def run_random_programs(chip, seeds: range):
    """Each seed's program, after a pause of this rank's own."""
    for seed in seeds:
        choice = random.Random(seed)
        cases = [random_case(choice, chip.world) for _ in range(choice.randint(1, 6))]
        inputs = [case.inputs(chip.world, seed + i) for i, case in enumerate(cases)]
        loaded = chip.compile(program(cases))
        time.sleep(random.Random(seed * chip.world + chip.rank).choice((0, 0, 0, 0.001, 0.01)))
        results = chip.run(loaded, *(each[chip.rank] for each in inputs))
        for case, each, result in zip(cases, inputs, results, strict=True):
            np.testing.assert_array_equal(result, case.expected(each)[chip.rank], f"seed {seed}: {case}")


@pytest.mark.parametrize(("world", "hosts"), [(2, 1), (4, 1), (2, 2), (4, 2), (3, 3)])
def test_random_programs(meshes, world, hosts, pytestconfig):
    """Mixed collectives, groups and delays: every result is right, on one host and between several."""
    count, step = pytestconfig.getoption("--random-programs"), 25
    for start in range(0, count, step):
        meshes(world, hosts).run(run_random_programs, seeds=range(start, min(count, start + step)))
