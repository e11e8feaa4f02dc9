"""tt-tpu run: a program on several chips, its output by rank, and what is refused before anything starts."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("cpu:gloo,tpu:tpu_dist")
x = torch.full((3,), dist.get_rank() + 1.0, device="tpu")
dist.all_reduce(x)
print("total", x[0].item(), sys.argv[1:], flush=True)
if "fail" in sys.argv and dist.get_rank() == 1:
    os._exit(3)  # as a crash does: an orderly exit waits for the other rank (torch_tpu's atexit)
if "wait" in sys.argv:
    time.sleep(600)
dist.destroy_process_group()
"""


@pytest.fixture
def start(tmp_path, root):
    """start(*arguments): `tt-tpu run` as a process; "SCRIPT" among them is the program."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_DEVICE")}
    environment |= {"TT_TPU_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path), "TT_TPU_BACKEND": "emulated"}

    def start(*arguments: str) -> subprocess.Popen:
        words = [str(script) if word == "SCRIPT" else word for word in arguments]
        return subprocess.Popen(
            [sys.executable, "-m", "launch.cli", "run", *words],
            env=environment, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    return start


def test_each_rank_says_its_own(start):
    """Two processes with a chip each sum over both; lines carry the rank, and the script gets its arguments."""
    process = start("--chips", "2", "SCRIPT", "--depth", "2")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err[-3000:]
    for rank in (0, 1):
        assert f"[rank {rank}] total 3.0 ['--depth', '2']" in out


def test_a_rank_that_fails_is_the_command_s_failure(start):
    """The exit status is not 0, and the failed rank and its status are named."""
    process = start("--chips", "2", "SCRIPT", "fail")
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "rank      : 1" in err and "exitcode  : 3" in err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("--chips", "7", "SCRIPT"), ["7 chips", "1, 2, 3, 4, 6, 8"]), (("--chips", "2", "nothing.py"), ["nothing.py"])],
    ids=str,
)
def test_what_cannot_run_is_refused(start, arguments, named):
    """A number of chips that no mesh has, and a missing script: one message, status 1."""
    process = start(*arguments)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert all(part in err for part in named) and "Traceback" not in err


def below(process: subprocess.Popen) -> list[psutil.Process]:
    """torchrun, its ranks and their compile service, once the ranks are at work."""
    for line in process.stdout:
        if "total" in line:
            break
    found = psutil.Process(process.pid).children(recursive=True)
    assert len(found) >= 4
    return found


def test_sigterm_ends_all_processes(start, tmp_path):
    """The processes end with the command, and its folder is gone."""
    process = start("--chips", "2", "SCRIPT", "wait")
    others = below(process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not psutil.wait_procs(others, timeout=10)[1]
    assert not list(tmp_path.glob("tt-tpu-run-*"))


def test_a_killed_command_leaves_no_process(start):
    """torchrun and its ranks end, however the command ended."""
    process = start("--chips", "2", "SCRIPT", "wait")
    others = below(process)
    process.kill()
    assert not psutil.wait_procs(others, timeout=20)[1]


def test_a_killed_torchrun_leaves_no_process(start, tmp_path):
    """The command ends torchrun's ranks in its place, says how torchrun ended, and removes what it had made."""
    process = start("--chips", "2", "SCRIPT", "wait")
    others = below(process)
    next(other for other in others if "torch.distributed.run" in other.cmdline()).kill()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert not psutil.wait_procs(others, timeout=10)[1]
    assert not list(tmp_path.glob("tt-tpu-*"))
