"""Eager programs compute on the chip what they compute on the CPU."""

import pytest


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16", "float64", "complex64"))
def test_matmul(torch, dtype):
    """A product in each type has the CPU's numbers and type."""
    a, b = (torch.randint(-4, 5, shape).to(getattr(torch, dtype)) for shape in ((5, 7), (7, 3)))
    result = a.to("tpu") @ b.to("tpu")
    assert (result.device.type, result.dtype) == ("tpu", a.dtype)
    torch.testing.assert_close(result.cpu(), a @ b)


def test_a_chain_of_operations(torch):
    """Views, writes in place, indexing, reductions and control flow on results follow the CPU."""

    def program(x):
        y = x.t()[1:].contiguous()
        y[0] += 2
        y[y > 1] = 0
        while y.abs().sum() > 1:
            y = y / 2
        values, order = y.flatten().sort(descending=True)
        return torch.cat([values, order.float(), y.cumsum(0).flatten(), y.std(dim=1)])

    x = torch.randn(6, 4)
    torch.testing.assert_close(program(x.to("tpu")).cpu(), program(x))


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "int64", "bool", "complex64"))
def test_copies_keep_every_bit(torch, dtype):
    """Host to chip to chip to host changes nothing, strides included."""
    x = (torch.randn(64, 33) * 100).to(getattr(torch, dtype)).t()
    back = x.to("tpu").clone().cpu()
    assert torch.equal(back, x) and back.stride() == x.stride()


def test_non_blocking_copies(torch):
    """Copies that do not wait, from and to pinned memory, hold the right numbers after a synchronization."""
    x = torch.randn(1000).pin_memory()
    assert x.is_pinned()
    doubled = x.to("tpu", non_blocking=True) * 2
    pinned, plain = torch.empty(1000).pin_memory(), doubled.to("cpu", non_blocking=True)
    pinned.copy_(doubled, non_blocking=True)
    torch.accelerator.synchronize()
    assert torch.equal(pinned, x * 2) and torch.equal(plain, x * 2)


@pytest.mark.parametrize("workers", (0, 2))
def test_data_loader(torch, workers):
    """A DataLoader pins its batches, read by itself or by worker processes, and none is lost or changed."""
    from torch.utils.data import DataLoader, TensorDataset

    data = torch.randn(64, 8)
    batches = list(DataLoader(TensorDataset(data), batch_size=16, pin_memory=True, num_workers=workers))
    assert all(batch.is_pinned() for (batch,) in batches)
    assert torch.equal(torch.cat([batch.to("tpu", non_blocking=True) for (batch,) in batches]).cpu(), data)


def test_save_and_load(torch, tmp_path):
    """A module saved from the chip loads on the chip and on the CPU with the same weights."""
    module = torch.nn.Linear(5, 3)
    weight = module.weight.detach().clone()
    torch.save(module.to("tpu").state_dict(), tmp_path / "module.pt")
    for place in ("tpu", "cpu"):
        loaded = torch.load(tmp_path / "module.pt", map_location=place)["weight"]
        assert loaded.device.type == place and torch.equal(loaded.cpu(), weight)


def test_autocast(torch):
    """Under autocast a linear layer computes in bfloat16, near to the CPU's autocast; outside it does not."""
    module, x = torch.nn.Linear(64, 64), torch.randn(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(x)
    module.to("tpu")
    with torch.autocast("tpu", torch.bfloat16):
        result = module(x.to("tpu"))
    assert result.dtype == torch.bfloat16 and module(x.to("tpu")).dtype == torch.float32
    torch.testing.assert_close(result.cpu(), expected, rtol=2e-2, atol=1e-2)


def test_two_threads(torch):
    """Threads that use the chip at once do not disturb each other."""
    from concurrent.futures import ThreadPoolExecutor

    def work(n):
        x = torch.full((32, 32), float(n), device="tpu")
        for _ in range(20):
            x = x @ torch.eye(32, device="tpu")
        return x.sum().item()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(8))) == [n * 1024.0 for n in range(8)]


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_reductions_keep_nan(torch, dtype):
    """Maxima, minima, their positions and pooling see a NaN wherever it stands, as on the CPU."""
    x = torch.randn(6, 40, dtype=getattr(torch, dtype))
    for row, column in enumerate((0, 7, 39)):
        x[row, column] = torch.nan

    def program(x):
        pooled = torch.nn.functional.max_pool1d(x[None], 3)
        positions = (x.argmax(-1), x.argmin(-1), *x.max(-1), *x.min(-1))
        return [x.amax(-1), x.amin(-1), x.amax(0), x.cummax(-1)[0], pooled, *positions, x.max()]

    for mine, expected in zip(program(x.to("tpu")), program(x), strict=True):
        torch.testing.assert_close(mine.cpu(), expected, rtol=0, atol=0, equal_nan=True)


SUMS = {
    "mean": lambda torch, x: x.mean(),
    "columns": lambda torch, x: x.sum(0),
    "variance": lambda torch, x: x.var(),
    "row times matrix": lambda torch, x: x.reshape(1, -1) @ x.reshape(-1, 1),
    "linear": lambda torch, x: torch.nn.functional.linear(x, x),
    "softmax": lambda torch, x: x.flatten().softmax(0),
    "average pool": lambda torch, x: torch.nn.functional.avg_pool2d(x[None], 50),
    "convolution": lambda torch, x: torch.nn.functional.conv2d(x[None, :, :, None], x[:4, :, None, None]),
    "group norm": lambda torch, x: torch.nn.functional.group_norm(x[None], 2),
    "index_add": lambda torch, x: x.new_zeros(2, 150).index_add(0, x.new_zeros(150, dtype=torch.long), x),
}


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("name", SUMS)
def test_long_sums_in_sixteen_bits(torch, name, dtype):
    """Sums over thousands of 16-bit numbers are no further from the truth than twice the CPU's, and an ulp."""
    x = (torch.rand(150, 150) / 8).to(getattr(torch, dtype))
    exact = SUMS[name](torch, x.double())
    mine, same = (SUMS[name](torch, y).cpu().double() for y in (x.to("tpu"), x))
    allowed = 2 * (same - exact).abs().max() + torch.finfo(x.dtype).eps * exact.abs().max()
    assert (mine - exact).abs().max() <= allowed
