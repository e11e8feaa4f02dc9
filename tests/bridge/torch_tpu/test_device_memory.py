"""The emulated chip's memory ends at its limit, and torch's figures of it are true."""

import re

import pytest

MIB = 1 << 20


def in_use(torch) -> int:
    """Bytes that torch.accelerator reports after everything has run."""
    import gc

    gc.collect()
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated()


def test_the_limit_is_what_torch_reports(small_torch):
    """Device properties and memory info show the limit of TT_TPU_EMULATED_MEMORY."""
    assert small_torch.tpu.get_device_properties(0).total_memory == 256 * MIB
    free, total = small_torch.accelerator.get_memory_info()
    assert total == 256 * MIB and 255 * MIB < free <= total


@pytest.mark.parametrize("way", ("allocate", "copy", "compute", "compiled"))
def test_past_the_limit_is_an_error(small_torch, way):
    """Whatever asks for more gets an error with the size asked, in use and the limit; the program goes on."""
    torch = small_torch
    held = torch.ones(64 * MIB // 4, device="tpu")
    before = in_use(torch)
    ask = {
        "allocate": lambda: torch.zeros(512 * MIB // 4, device="tpu")[0].item(),
        "copy": lambda: torch.ones(512 * MIB // 4).to("tpu")[0].item(),
        "compute": lambda: (torch.ones(1 << 14, 1, device="tpu") * torch.ones(1, 1 << 13, device="tpu")).sum().item(),
        "compiled": lambda: torch.compile(lambda x: (x + 1).repeat(8))(held).cpu(),
    }[way]
    with pytest.raises(RuntimeError) as caught:
        ask()
    text = str(caught.value)
    assert "RESOURCE_EXHAUSTED" in text and f"{512 * MIB} bytes" in text, text
    # The operation's own small operands may be in use as well.
    (used,) = re.findall(r"(\d+) bytes \([^)]*\) in use", text)
    assert before <= int(used) < before + MIB and f"limit {256 * MIB} bytes" in text, text
    assert in_use(torch) == before
    assert held.sum().item() == held.numel()


def test_memory_comes_back(small_torch):
    """Ten times the limit can be used one after the other."""
    for _ in range(20):
        x = small_torch.ones(128 * MIB // 4, device="tpu")
        assert x[-1].item() == 1
        del x


def test_figures_and_peak(small_torch):
    """memory_allocated counts each tensor's bytes, the peak the most at one time."""
    torch = small_torch
    base = in_use(torch)
    kept = torch.ones(4 * MIB, dtype=torch.uint8).to("tpu")
    assert in_use(torch) - base == 4 * MIB
    torch.accelerator.reset_peak_memory_stats()
    passing = torch.ones(32 * MIB, dtype=torch.uint8).to("tpu")
    assert in_use(torch) - base == 36 * MIB
    del passing
    assert in_use(torch) - base == 4 * MIB
    assert torch.accelerator.max_memory_allocated() - base == 36 * MIB
    del kept
    assert in_use(torch) == base


def test_writing_in_place_takes_no_second_buffer(small_torch):
    """In-place operations hand their buffer over: 160 of 256 MiB can be written in place, and the peak stays."""
    torch = small_torch
    x = torch.zeros(160 * MIB // 4, device="tpu")
    before = in_use(torch)
    torch.accelerator.reset_peak_memory_stats()
    for _ in range(3):
        x.add_(1)
        torch.accelerator.synchronize()
    assert in_use(torch) - before < MIB and torch.accelerator.max_memory_allocated() - before < MIB
    assert x[-1].item() == 3


def test_a_donated_buffer_is_not_lost_for_others(torch):
    """A view and a detached alias of a tensor that is written in place see the new numbers."""
    x = torch.zeros(4, 4, device="tpu")
    row, alias = x[1], x.detach()
    x.add_(1)
    x.mul_(3)
    assert row.tolist() == [3.0] * 4 and alias.sum().item() == 48
