"""The end of a server."""

import time

import psutil
import pytest
from leftovers import SHARED_MEMORY, alive, orphaned


@pytest.mark.needs_process
@pytest.mark.ends_server
def test_sigterm_ends_it_cleanly(server):
    """SIGTERM ends a server within 10 seconds with status 0, and leaves no process and no shared-memory segment.

    A live server is not ours to end.
    """
    processes = server.processes()
    began = time.monotonic()
    server.process.terminate()
    assert server.process.wait(30) == 0
    assert time.monotonic() - began <= 10
    psutil.wait_procs(processes, timeout=10 - (time.monotonic() - began))
    assert not [process for process in processes if alive(process)]
    assert not orphaned(set(SHARED_MEMORY.iterdir()) - server.shared_memory_before)


@pytest.mark.needs_process
@pytest.mark.ends_server
def test_the_log_ends_with_the_kernels_used(server):
    """The log of a server that was ended names the calls that its programs attend and write the cache with."""
    server.process.terminate()
    server.process.wait(30)
    said = next(line for line in server.log.read_text(errors="replace").splitlines() if line.startswith("tt-tpu: kernels"))
    for call in ("paged_scaled_dot_product_attention_decode", "chunked_scaled_dot_product_attention", "paged_update_cache"):
        assert f"tt.{call} ×" in said
