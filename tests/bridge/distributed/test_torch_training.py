"""PyTorch's ways to train on several chips give what one process on the CPU gives."""

import copy

import pytest

STEPS = 20


def make_model(torch, width: int = 16):
    """Two layers with a normalisation between them, the same in every process."""
    torch.manual_seed(0)
    nn = torch.nn
    return nn.Sequential(nn.Linear(8, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 4))


def batches(torch, world: int):
    """Inputs and targets of each step, as many rows as can be divided among the ranks."""
    random = torch.Generator().manual_seed(1)
    return [(torch.randn(4 * world, 8, generator=random), torch.randn(4 * world, 4, generator=random)) for _ in range(STEPS)]


def train(torch, model, data, optimizer):
    """The losses of training on `data`."""
    losses = []
    for x, y in data:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def reference(torch, world: int):
    """The model after training on the CPU, in this process alone, on all rows."""
    model = make_model(torch)
    train(torch, model, batches(torch, world), torch.optim.AdamW(model.parameters(), lr=1e-2))
    return model


def own_rows(torch, rank: int, world: int):
    """This rank's rows of every batch, on the chip."""
    return [tuple(each.chunk(world)[rank].to("tpu") for each in batch) for batch in batches(torch, world)]


def assert_same_parameters(torch, model, expected):
    """Every parameter of `model`, whole or divided, is that of `expected`."""
    from torch.distributed.tensor import DTensor

    for (name, value), (_, wanted) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        value = value.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        torch.testing.assert_close(value.cpu(), wanted.detach(), rtol=2e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")


def run_ddp(chip):
    """DistributedDataParallel, gradients averaged over the ranks."""
    torch = chip.torch
    model = torch.nn.parallel.DistributedDataParallel(make_model(torch).to("tpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(torch, model, own_rows(torch, chip.rank, chip.world), optimizer)
    assert_same_parameters(torch, model.module, reference(torch, chip.world))


def run_fsdp(chip):
    """fully_shard: parameters are gathered, gradients reduced and scattered."""
    torch = chip.torch
    from torch.distributed.fsdp import fully_shard

    model = make_model(torch).to("tpu")
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(torch, model, own_rows(torch, chip.rank, chip.world), optimizer)
    assert_same_parameters(torch, model, reference(torch, chip.world))


def run_tensor_parallel(chip):
    """DTensor: the first layer's columns and the second one's rows are divided."""
    torch = chip.torch
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    model = copy.deepcopy(plain).to("tpu")
    mesh = torch.distributed.device_mesh.init_device_mesh("tpu", (chip.world,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    data = batches(torch, chip.world)
    train(torch, plain, data, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    train(torch, model, [(x.to("tpu"), y.to("tpu")) for x, y in data], torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))
    assert_same_parameters(torch, model, plain)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("way", [run_ddp, run_fsdp, run_tensor_parallel])
def test_training_equals_one_process(torch_meshes, way, world):
    """After twenty steps the parameters are those that a single process gets from all rows."""
    torch_meshes(world).run(way)


def run_compiled_collectives(chip):
    """Functional collectives inside torch.compile: one program, with the results of eager ones."""
    torch = chip.torch
    from torch.distributed import _functional_collectives as functional

    group, world = torch.distributed.group.WORLD, chip.world

    @torch.compile(fullgraph=True)
    @torch.tpu.distributed.spmd_safe
    def step(x):
        y = functional.all_reduce(x * 2, "sum", group)
        z = functional.all_gather_tensor(y + 1, 0, group)
        return functional.reduce_scatter_tensor(z.relu(), "sum", 0, group)

    x = torch.arange(8.0).reshape(4, 2) + chip.rank
    total = sum(torch.arange(8.0).reshape(4, 2) + rank for rank in range(world)) * 2 + 1
    before = chip.compiled_programs()
    result = step(x.to("tpu")).cpu()
    torch.testing.assert_close(result, total * world)
    return chip.compiled_programs() - before


def test_collectives_under_compile_are_one_program(torch_meshes):
    """Three collectives and what is between them are one program."""
    assert torch_meshes(2).run(run_compiled_collectives) == [1, 1]


def run_checkpoint(chip, folder: str):
    """Save what is divided among the ranks, load it into another model."""
    torch = chip.torch
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model, other = make_model(torch).to("tpu"), make_model(torch).to("tpu")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    for each in (model, other):
        fully_shard(each)
    checkpoint.save(get_model_state_dict(model), checkpoint_id=folder)
    state = get_model_state_dict(other)
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state)
    assert_same_parameters(torch, other, make_model(torch))


@pytest.mark.parametrize("world", [2, 4])
def test_a_distributed_checkpoint_comes_back(torch_meshes, tmp_path, world):
    """torch.distributed.checkpoint saves each rank's part, and loads it again."""
    torch_meshes(world).run(run_checkpoint, folder=str(tmp_path))
