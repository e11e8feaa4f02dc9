"""Run a PyTorch program on several chips: torchrun, one process a chip.

Each line of a process's output carries its rank. What follows the script is the script's.
"""

import argparse
import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bridge import backend, mesh, settings
from bridge.errors import LaunchError
from launch import server
from launch.signals import Stopped, watch

_PREFIX = "[rank ${rank}] "
_PR_SET_CHILD_SUBREAPER = 36
_END_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tt-tpu run`."""
    parser.add_argument("--chips", type=int, default=1, metavar="N", help="processes, and chips, on this machine (default 1)")
    parser.add_argument("script", help="the program's file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own arguments")


def command(chips: int, script: str, arguments: Sequence[str], logs: str) -> list[str]:
    """torchrun's command line; `logs` is a folder for what it keeps of the processes' output."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(chips),
        "--tee", "3", "--log-dir", logs, script, *arguments,
    ]  # fmt: skip


def end_orphans() -> None:
    """End what torchrun has left where it was killed: this process has inherited it."""
    import psutil  # here, for `tt-tpu doctor` must run where nothing is installed

    left = psutil.Process().children(recursive=True)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(left, timeout=_END_SECONDS)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def run(args: argparse.Namespace, _unknown: Sequence[str]) -> int:
    """Run until all processes have ended; torchrun's exit status, 1 if one of them failed.

    Raises:
        LaunchError: there is no such script.
        MeshError: no mesh has so many chips.
    """
    if not Path(args.script).is_file():
        raise LaunchError(f"there is no file {args.script}: name the program to run")
    chosen = settings.load()
    mesh.choose(chosen, backend.resolve(chosen), args.chips)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryDirectory(prefix="tt-tpu-run-") as logs:
        environment = server.environment() | {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": _PREFIX}
        environment = {"OMP_NUM_THREADS": str(max(1, os.cpu_count() // args.chips))} | environment
        process = subprocess.Popen(
            command(args.chips, args.script, args.arguments, logs),
            env=environment,
            start_new_session=True,
            preexec_fn=server.end_with_parent,
        )
        try:
            watch()
            status = process.wait()
            return status if status >= 0 else 128 - status
        except Stopped as stopped:
            server.stop(process, seconds=35)  # torchrun gives its processes 30 s
            return 128 + stopped.number
        finally:
            end_orphans()
