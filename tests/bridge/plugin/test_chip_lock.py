"""A chip's lock: one process a chip. Where there are no chips, names stand in for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.backend import PLUGIN

CLAIM = """
import ctypes, sys
claim = ctypes.CDLL(sys.argv[1]).TtTpuClaimChip
claim.restype = ctypes.c_char_p
print(claim(sys.argv[2].encode()).decode(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def claim():
    """claim(): a process that takes the lock of a chip of this test's own, or is refused, and then waits."""
    name, started = f"test-{os.getpid()}", []

    def claim() -> tuple[subprocess.Popen, str]:
        process = subprocess.Popen(
            [sys.executable, "-c", CLAIM, PLUGIN, name],
            env=os.environ | {"TT_TPU_PLUGIN_CONFIG": "inner_library=none\n", "LIBTT_TPU_COMPAT": "0"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process, process.stdout.readline().strip()

    yield claim
    for process in started:
        process.kill()
        process.communicate()
    Path(f"/tmp/tt-tpu-chip-{name}.lock").unlink(missing_ok=True)


def test_a_chip_in_use_is_refused(claim):
    """The error names the process that has the chip; when that one has ended, the chip can be had, and no lock stays."""
    first, refusal = claim()
    assert not refusal
    second, refusal = claim()
    assert f"is in use by process {first.pid}: end that one" in refusal
    first.communicate("")
    third, refusal = claim()
    assert not refusal
    assert "killed" not in third.communicate("")[1]
    assert not list(Path("/tmp").glob(f"tt-tpu-chip-test-{os.getpid()}.lock"))


def test_a_stale_lock_is_taken_over(claim):
    """A lock whose process was killed keeps nobody out, and one line says whose it was."""
    first, _ = claim()
    first.kill()
    first.wait()
    second, refusal = claim()
    assert not refusal
    assert f"its last process, {first.pid}, was killed; taking over" in second.communicate("")[1]
