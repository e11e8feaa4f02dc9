"""The platform inside an unmodified SGLang, each time in a process of its own."""

import os
import subprocess
import sys

import pytest


def run(source: str, **environment: str) -> str:
    """What `source` prints in a process where the chip is presented as a TPU."""
    variables = os.environ | {"LIBTT_TPU_COMPAT": "1", "SGLANG_PLATFORM": "tpu_oot"} | environment
    variables.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    done = subprocess.run(
        [sys.executable, "-c", source], env=variables, cwd="/", capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def test_every_hook_finds_its_place():
    """SGLang has each function that is hooked; require_hooks would raise otherwise."""
    source = """
from sglang.srt.plugins import load_plugins
load_plugins()
from bridge.sglang_platform import plugin
plugin.require_hooks()
from sglang.srt.platforms import current_platform
print(type(current_platform).__name__, current_platform.device_name)
"""
    assert run(source) == "TpuPlatform tpu"


def test_a_missing_hook_is_an_error():
    """Where SGLang has not what a hook is for, the platform refuses to serve, naming the place."""
    source = """
from bridge.sglang_platform import plugin
try:
    plugin.require_hooks()
except Exception as error:
    print(type(error).__name__, "capture_cuda_graphs" in str(error), "0.5.23" in str(error))
"""
    assert run("import sglang\n" + source) == "BridgeError True True"


def test_imports_succeed_without_triton_and_torchvision():
    """SGLang's scheduler is imported; the lent torchvision is gone, and a Triton kernel says why it cannot run."""
    source = """
import sys, importlib.util
import sglang.srt.managers.scheduler
import triton
@triton.jit
def kernel(x): pass
try:
    kernel[(1,)](3)
except Exception as error:
    refusal = "kernel" in str(error) and "Triton" in str(error)
print(refusal, "torchvision" in sys.modules, importlib.util.find_spec("torchvision"))
"""
    assert run(source) == "True False None"


@pytest.mark.parametrize("compat", ["0", ""])
def test_the_platform_stands_back_without_compat(compat):
    """Where the chip is not presented as a TPU, activate() names no platform."""
    source = "from bridge.sglang_platform import activate; print(activate())"
    assert run(source, LIBTT_TPU_COMPAT=compat) == "None"


def test_a_program_takes_over_what_is_donated_to_it():
    """compile_function's program computes what its function does, and a donated cache is not held twice."""
    source = """
import sglang, torch
from bridge.sglang_platform.programs import compile_function
cache, x, row = torch.zeros(6, 4), torch.arange(4.0), torch.tensor([2])
def step(cache, x, row):
    return [x.sum(), cache.index_put((row,), x[None])]
arguments = [t.to("tpu") for t in (cache, x, row)]
program = compile_function(step, [torch.empty_like(t, device="meta") for t in (cache, x, row)], [0], "step")
program.resolve()
total, written = program(arguments)
assert torch.equal(written.cpu(), cache.index_put((row,), x[None]))
try:
    arguments[0].cpu()
except RuntimeError as error:
    print(total.item(), "donated" in str(error))
"""
    assert run(source) == "6.0 True"
