"""Functional collectives under torch.compile, each of them."""

import pytest


def run_compiled(chip, name: str, safe: bool):
    """One collective between two operations on x [4, 2], compiled; against the same on the CPU."""
    torch = chip.torch
    from torch.distributed import _functional_collectives as functional

    group = torch.distributed.group.WORLD
    collectives = {
        "all_reduce sum": lambda x: functional.all_reduce(x, "sum", group),
        "all_reduce avg": lambda x: functional.all_reduce(x, "avg", group),
        "all_reduce max": lambda x: functional.all_reduce(x, "max", group),
        "all_gather_tensor 0": lambda x: functional.all_gather_tensor(x, 0, group),
        "all_gather_tensor 1": lambda x: functional.all_gather_tensor(x, 1, group),
        "reduce_scatter_tensor 0": lambda x: functional.reduce_scatter_tensor(x, "sum", 0, group),
        "reduce_scatter_tensor 1": lambda x: functional.reduce_scatter_tensor(x, "sum", 1, group),
        "all_to_all_single": lambda x: functional.all_to_all_single(x, None, None, group),
        "broadcast": lambda x: functional.broadcast(x, 1, group),
    }

    def step(x):
        return collectives[name](x * 2 + 1) - 3

    torch._dynamo.reset()  # the other collectives' programs count for this function's limit
    step = torch.tpu.distributed.spmd_safe(step) if safe else step
    inputs = [torch.arange(8.0).reshape(4, 2) * (rank + 1) for rank in range(chip.world)]
    result = torch.compile(step, fullgraph=True)(inputs[chip.rank].to("tpu"))
    torch.testing.assert_close(result.cpu(), expected(torch, name, [x * 2 + 1 for x in inputs], chip.rank) - 3)


def expected(torch, name: str, inputs: list, rank: int):
    """What `rank` gets of everyone's operands."""
    kind, _, option = name.partition(" ")
    if kind == "all_reduce":
        stacked = torch.stack(inputs)
        return {"sum": stacked.sum(0), "avg": stacked.mean(0), "max": stacked.amax(0)}[option]
    if kind == "all_gather_tensor":
        return torch.cat(inputs, int(option))
    if kind == "reduce_scatter_tensor":
        return torch.stack(inputs).sum(0).chunk(len(inputs), int(option))[rank]
    if kind == "all_to_all_single":
        return torch.cat([x.chunk(len(inputs))[rank] for x in inputs])
    return inputs[1]


NAMES = [
    "all_reduce sum", "all_reduce avg", "all_reduce max", "all_gather_tensor 0", "all_gather_tensor 1",
    "reduce_scatter_tensor 0", "reduce_scatter_tensor 1", "all_to_all_single", "broadcast",
]  # fmt: skip


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_compiled_collectives(torch_meshes, name, safe):
    """Each functional collective gives under torch.compile what it means, in a graph that is split at it or (spmd_safe) not."""
    torch_meshes(2).run(run_compiled, name=name, safe=safe)
