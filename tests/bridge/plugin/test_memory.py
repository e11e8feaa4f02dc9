"""Memory is counted as it is taken and given back, and it ends."""

import gc

import pypjrt
import pytest
from programs import F32, add, floats, increment_in_place, read

N = 1 << 18
BYTES = 4 * N


def in_use(device) -> int:
    return device.memory_stats()["bytes_in_use"]


@pytest.fixture(autouse=True)
def _collected():
    gc.collect()


def test_a_buffer_counts_until_it_is_closed(client, device):
    """bytes_in_use grows by a buffer's size and shrinks by it, whether it is closed or deleted."""
    before = in_use(device)
    first, second = (floats(client, device, [0.0] * N) for _ in range(2))
    assert in_use(device) == before + 2 * BYTES
    first.close()
    assert in_use(device) == before + BYTES
    second.delete()
    assert in_use(device) == before
    second.close()
    assert in_use(device) == before


def test_results_count(client, device):
    """An execution's results take memory of their size."""
    before = in_use(device)
    with client.compile(add(N)) as program:
        a, b = floats(client, device, [1.0] * N), floats(client, device, [2.0] * N)
        (c,) = program(a, b)
        assert in_use(device) == before + 3 * BYTES
        assert read(c)[:2] == [3.0, 3.0]
        for buffer in (a, b, c):
            buffer.close()
    assert in_use(device) == before


def test_a_donated_array_keeps_its_memory(client, device):
    """An array from the host that programs have written in its place is not overwritten by those that come after it."""
    with client.compile(increment_in_place(N)) as program:
        kept = []
        for turn in range(8):
            buffer = floats(client, device, [float(turn)] * N)
            for _ in range(turn % 3):
                (buffer,) = program(buffer)
            kept.append(buffer)
            dropped = floats(client, device, [-1.0] * N)
            dropped.close()
        for turn, buffer in enumerate(kept):
            assert set(read(buffer)) == {turn + turn % 3}
            buffer.close()


def test_a_donated_argument_is_not_counted_twice(client, device):
    """Work in place takes no memory: neither in use nor at the peak."""
    before = in_use(device)
    with client.compile(increment_in_place(N)) as program:
        buffer = floats(client, device, [1.0] * N)
        device.clear_memory_stats()
        for _ in range(3):
            (buffer,) = program(buffer)
        stats = device.memory_stats()
        assert stats["bytes_in_use"] == before + BYTES
        assert stats["peak_bytes_in_use"] < before + BYTES + 4096
        assert read(buffer)[0] == 4.0
        buffer.close()
    assert in_use(device) == before


def test_an_argument_kept_from_donation_counts(client, device):
    """A caller that forbids donation keeps its buffer, and both count."""
    before = in_use(device)
    with client.compile(increment_in_place(N)) as program:
        kept = floats(client, device, [1.0] * N)
        (result,) = program(kept, non_donatable=[0])
        assert in_use(device) == before + 2 * BYTES
        assert read(kept)[0] == 1.0 and read(result)[0] == 2.0
        kept.close(), result.close()
    assert in_use(device) == before


def test_the_peak_stays_until_it_is_cleared(client, device):
    """peak_bytes_in_use is the most that was in use since the last clear."""
    device.clear_memory_stats()
    before = in_use(device)
    floats(client, device, [0.0] * N).close()
    assert device.memory_stats()["peak_bytes_in_use"] == before + BYTES
    device.clear_memory_stats()
    assert device.memory_stats()["peak_bytes_in_use"] == before


def test_allocation_past_the_limit_says_how_much(client, device):
    """RESOURCE_EXHAUSTED names the bytes asked, in use and the limit, and takes nothing."""
    stats = device.memory_stats()
    wanted = stats["bytes_limit"] - stats["bytes_in_use"] + 4
    with pytest.raises(pypjrt.errors.PjrtError) as raised:
        client.uninitialized_buffer(F32, [wanted // 4], device.default_memory())
    assert raised.value.code == 8
    for number in (wanted // 4 * 4, stats["bytes_in_use"], stats["bytes_limit"]):
        assert f"{number} bytes" in str(raised.value)
    assert in_use(device) == stats["bytes_in_use"]


def test_a_result_past_the_limit_is_refused(client, device):
    """An execution whose result does not fit fails before it runs, and everything else goes on."""
    stats = device.memory_stats()
    large = stats["bytes_limit"] // 4 // 3 * 2 // 1024 * 1024  # two thirds of the memory: once, not twice
    kind = f"tensor<{large}xf32>"
    program = f"""module @fill {{ func.func public @main() -> {kind} {{
      %0 = stablehlo.constant dense<1.0> : tensor<f32>
      %1 = stablehlo.broadcast_in_dim %0, dims = [] : (tensor<f32>) -> {kind}
      return %1 : {kind} }} }}"""
    hold = client.uninitialized_buffer(F32, [large], device.default_memory())
    with client.compile(program) as fill:
        with pytest.raises(pypjrt.errors.PjrtError, match="RESOURCE_EXHAUSTED"):
            fill()
    hold.close()
    assert in_use(device) == stats["bytes_in_use"]


def test_an_async_transfer_counts_from_its_start(client, device):
    """Buffers promised to a transfer manager count at once; those never fetched are given back with it."""
    before = in_use(device)
    with client.async_transfer([pypjrt.transfer.ShapeSpec(F32, (N,))] * 2, device=device) as transfer:
        assert in_use(device) == before + 2 * BYTES
        transfer.transfer(0, bytearray(BYTES))
        fetched = transfer.retrieve(0)
        assert in_use(device) == before + 2 * BYTES
    assert in_use(device) == before + BYTES
    fetched.close()
    assert in_use(device) == before


def test_host_memory_is_not_the_chips(client, device):
    """A buffer in pinned host memory takes nothing of the chip's."""
    before = in_use(device)
    host = next(memory for memory in device.memories() if memory.kind == "pinned_host")
    buffer = floats(client, device, [0.0] * N)
    copy = buffer.copy_to_memory(host)
    assert in_use(device) == before + BYTES
    copy.close(), buffer.close()
