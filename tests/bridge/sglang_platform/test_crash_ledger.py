"""The end of a server's processes, without SGLang: one that answers HTTP, and one below it."""

import signal
import subprocess
import sys

import psutil

SERVER = """
import multiprocessing, subprocess, sys, threading, time
from bridge.sglang_platform import crash
crash.prepare()
crash.note("file", sys.argv[1])
below = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
below.start()
service = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, start_new_session=True)
print(below.pid, service.pid, flush=True)
"""
BELOW = """
subprocess.run([sys.executable, "-c", "from bridge.sglang_platform import crash; crash.note('failed', 'rank 0: rank 1 is gone')"])
crash._watch(below, "rank 1")
threading.Thread(target=below.join).start()  # as SGLang waits for it too
below.kill()
time.sleep(600)
"""
ENDS_WELL = """
well = multiprocessing.get_context("fork").Process(target=int)
well.start()
crash._watch(well, "rank 2")
well.join()
time.sleep(1)
print("goes on", file=sys.stderr)
below.kill()
service.kill()
"""
FAILS = """
subprocess.run([sys.executable, "-c", "from bridge.sglang_platform import crash; crash.note('failed', 'rank 0: no memory')"])
crash.kill_process_tree(None, __import__("os").getpid())
"""


def start(tmp_path, source: str) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """A server that goes on with `source`, and its two processes: one of its session, one of its own."""
    (tmp_path / "left").touch()
    command = [sys.executable, "-c", SERVER + source, tmp_path / "left"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return server, [psutil.Process(int(pid)) for pid in server.stdout.readline().split()]


def test_a_killed_process_is_the_cause(tmp_path):
    """It is named, and not what failed for lack of it; the others end, and the file goes."""
    server, others = start(tmp_path, BELOW)
    errors = server.communicate(timeout=20)[1]
    assert server.returncode == 1
    assert errors.splitlines()[-1].startswith(f"error: rank 1 (process {others[0].pid}) was ended by SIGKILL")
    assert not psutil.wait_procs(others, timeout=5)[1]
    assert not (tmp_path / "left").exists()


def test_a_failure_is_the_cause(tmp_path):
    """What a process below has noted is the last line of SGLang's way out."""
    server, others = start(tmp_path, FAILS)
    errors = server.communicate(timeout=20)[1]
    assert (server.returncode, errors.splitlines()[-1]) == (1, "error: rank 0: no memory; the server has ended")
    assert not psutil.wait_procs(others, timeout=5)[1]


def test_a_process_that_ends_well_ends_nothing(tmp_path):
    """As the ranks of a machine do when they are told that the first machine's server is stopped."""
    server, _ = start(tmp_path, ENDS_WELL)
    assert server.communicate(timeout=20)[1] == "goes on\n"
    assert server.returncode == 0


def test_sigterm_before_it_serves(tmp_path):
    """Nothing stays behind, and the exit status tells of the signal."""
    server, others = start(tmp_path, "time.sleep(600)")
    server.send_signal(signal.SIGTERM)
    server.communicate(timeout=20)
    assert server.returncode == 128 + signal.SIGTERM
    assert not psutil.wait_procs(others, timeout=5)[1]
    assert not (tmp_path / "left").exists()
