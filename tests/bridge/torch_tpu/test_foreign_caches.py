"""Caches that torch and torch_tpu keep outlive a build of the bridge: another build's entry is a miss, not a crash."""

import pytest
from chip_process import environment, run_python

# The build is told by the fingerprint; the platform's version, which torch_tpu's keys hold, stays the same here.
PROGRAM = """
import ctypes, os, re, sys
config = os.environ["TT_TPU_PLUGIN_CONFIG"]
os.environ["TT_TPU_PLUGIN_CONFIG"] = re.sub("(?m)^fingerprint=.*$", "fingerprint=" + sys.argv[1], config)
import torch

@torch.compile
def function(x):
    return torch.nn.functional.gelu(x @ x).sum()

print("result", round(function(torch.eye(8, device="tpu")).item(), 4), torch.arange(5, device="tpu").exp().sum().item())
count = ctypes.CDLL(os.environ["TPU_LIBRARY_PATH"]).TtTpuCompiledProgramCount
count.restype = ctypes.c_ulong
print("compiled", count())
"""


def run(folder, fingerprint, **variables) -> tuple[str, int]:
    """What the program printed, and how many programs it compiled."""
    done = run_python(PROGRAM, environment(folder, **variables), fingerprint)
    assert done.returncode == 0, done.stderr
    result, compiled = (line for line in done.stdout.splitlines() if line.startswith(("result", "compiled")))
    return result, int(compiled.split()[1])


@pytest.mark.parametrize("cache", ("TORCHINDUCTOR_CACHE_DIR", "TORCH_TPU_TIER2_COMPILATION_CACHE"))
def test_another_builds_executable_is_a_miss(tmp_path, cache):
    """A cache shared by two builds: each finds its own programs again, and compiles the other's anew, rightly."""
    place = {cache: str(tmp_path / "shared")}
    if cache == "TORCH_TPU_TIER2_COMPILATION_CACHE":
        place["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "inductor")
    first, compiled = run(tmp_path, "one", **place)
    assert compiled > 0
    again, found = run(tmp_path, "one", **place)
    assert again == first and found < compiled
    other, anew = run(tmp_path, "two", **place)
    assert other == first and anew > found


def test_builds_have_inductor_caches_of_their_own(tmp_path):
    """Unless the user names one, the folder of Inductor's cache carries the build's fingerprint."""
    source = "import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'], os.environ['TT_TPU_PLUGIN_CONFIG'])"
    folder, *config = run_python(source, environment(tmp_path)).stdout.split()
    (fingerprint,) = (line.split("=")[1] for line in config if line.startswith("fingerprint="))
    assert folder.startswith(str(tmp_path)) and fingerprint in folder
