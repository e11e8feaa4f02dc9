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


@pytest.mark.parametrize(("world", "hosts"), [(2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("way", [run_ddp, run_fsdp, run_tensor_parallel])
def test_training_equals_one_process(torch_meshes, way, world, hosts):
    """After twenty steps the parameters are those that a single process gets from all rows."""
    torch_meshes(world, hosts).run(way)


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


def save_checkpoint(chip, folder: str):
    """Save the model and its optimizer's state after one step of training, divided among the ranks."""
    torch = chip.torch
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = make_divided(torch)
    train(torch, model, [(torch.ones(4, 8, device="tpu"), torch.ones(4, 4, device="tpu"))], optimizer)
    state, optimizer_state = get_state_dict(model, optimizer)
    checkpoint.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return {name: value.full_tensor().cpu().tolist() for name, value in state.items()}


def load_checkpoint(chip, folder: str):
    """What a model of these ranks has after loading, and after one step more."""
    torch = chip.torch
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = make_divided(torch)
    state, optimizer_state = get_state_dict(model, optimizer)
    checkpoint.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    loaded = {name: value.full_tensor().cpu().tolist() for name, value in model.state_dict().items()}
    train(torch, model, [(torch.ones(4, 8, device="tpu"), torch.ones(4, 4, device="tpu"))], optimizer)
    return loaded, {name: value.full_tensor().cpu().tolist() for name, value in model.state_dict().items()}


def make_divided(torch):
    """The model under FSDP2, and its optimizer."""
    from torch.distributed.fsdp import fully_shard

    model = make_model(torch).to("tpu")
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize(("saved", "loaded"), [(2, 4), (4, 2)])
def test_a_distributed_checkpoint_fits_other_worlds(torch_meshes, tmp_path, saved, loaded):
    """A checkpoint of an FSDP2 model and its optimizer is loaded by another number of ranks, which go on as the first would have."""
    import torch

    wanted = torch_meshes(saved).run(save_checkpoint, folder=str(tmp_path))[0]
    results = torch_meshes(loaded).run(load_checkpoint, folder=str(tmp_path))
    assert all(before == wanted for before, _ in results)
    model = make_model(torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(torch, model, [(torch.ones(4, 8), torch.ones(4, 4))] * 2, optimizer)
    for name, value in model.state_dict().items():
        for _, after in results:
            torch.testing.assert_close(torch.tensor(after[name]), value, rtol=2e-3, atol=2e-4)
