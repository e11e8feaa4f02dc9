"""A serving process of SGLang: started, waited for, told of signals, stopped.

`tt-tpu serve`, the demonstration and the tests share it. The server runs in a
process group of its own, so that what is left of it can be ended as a whole.
"""

import contextlib
import ctypes
import errno
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bridge import ports
from bridge.errors import LaunchError

STOP_SECONDS = 10.0
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    def free(self) -> bool:
        """Whether a server could listen here now; LaunchError if the host is not one of this machine's."""
        error = ports.listening_error(self.host, self.port)
        if error is None or error.errno in (errno.EADDRINUSE, errno.EACCES):
            return error is None
        raise LaunchError(f"cannot listen on {self.host}: {error}; name an address of this machine")

    def answers(self) -> bool:
        """Whether a server here says that it is healthy; one that listens everywhere is asked on loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        connection = http.client.HTTPConnection(host, self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def command(model: str, address: Address, options: Sequence[str]) -> list[str]:
    """The command line that serves `model` at `address` on the chips."""
    launcher = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
    return [*launcher, "--host", address.host, "--port", str(address.port), "--device", "tpu", *options]


def environment() -> dict[str, str]:
    """This process's environment, with the chips presented as TPUs and SGLang's platform chosen."""
    return os.environ | {"LIBTT_TPU_COMPAT": "1", "SGLANG_PLATFORM": "tpu_oot"}


def end_with_parent() -> None:
    """In a child process before it runs its program: SIGTERM comes when its parent has ended."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def start(arguments: Sequence[str], log: IO | None = None) -> subprocess.Popen:
    """Start the server; its output goes to `log`, or where this process's own goes.

    The kernel sends it SIGTERM when this process ends, however that happens.
    """
    return subprocess.Popen(
        arguments,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )


def wait_ready(server: subprocess.Popen, address: Address, seconds: float) -> float:
    """Poll until the server answers.

    Returns:
        The seconds it took.

    Raises:
        LaunchError: it ended, did not answer in time, or another program answers in its place.
    """
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if server.poll() is not None:
            raise LaunchError(f"the server ended before it was ready (exit status {server.returncode}); see its output")
        if address.answers():
            if not _listens(server, address.port):
                raise LaunchError(f"port {address.port} is in use by another program, which answers there: choose another --port")
            return time.monotonic() - began
        time.sleep(0.25)
    raise LaunchError(f"the server did not answer at {address} within {seconds:.0f} s; see its output")


def _listens(server: subprocess.Popen, port: int) -> bool:
    """Whether one of the server's processes listens at the port."""
    import psutil  # SGLang's, not of what this command needs where nothing is installed

    tree = [psutil.Process(server.pid)]
    tree += tree[0].children(recursive=True)
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(each.laddr.port == port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN):
                return True
    return False


def stop(server: subprocess.Popen, seconds: float = STOP_SECONDS) -> int:
    """Ask the server to end; returns its exit status (negative: the signal that ended it).

    One that does not end in time, or ends with an error, may leave processes
    behind: then its whole process group is killed.
    """
    if server.poll() is None:
        server.terminate()
    try:
        server.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"the server did not end within {seconds:.0f} s and is killed", file=sys.stderr)
    if server.returncode != 0:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
    return server.wait()
