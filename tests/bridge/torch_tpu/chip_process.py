"""A process in which torch sees the chip and which runs test functions one after the other.

pytest's own process has no chip, and what a program imports cannot be undone: so the tests of
one module share a process like this one, started once, and only those that need an interpreter
of their own pay for it. Run as a program it is that process.
"""

import importlib.util
import os
import pickle
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """The variables of a process that sees the chip and shares no cache with others."""
    ours = ("LIBTT", "TT_TPU", "TPU", "TORCH")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return clean | {"LIBTT_TPU_COMPAT": "1", "TT_TPU_CACHE_DIR": str(folder), "PYTHONWARNINGS": "ignore"} | variables


def run_python(source: str, variables: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    """Run a program in an interpreter of its own."""
    command = [sys.executable, "-c", source, *arguments]
    return subprocess.run(command, env=variables, cwd="/", capture_output=True, text=True, timeout=300, check=False)


class ChipProcess:
    """The test's end: calls functions of test modules by name, in the process."""

    def __init__(self, variables: dict[str, str]):
        self._variables = variables
        self._process = None

    def call(self, path: Path, name: str, arguments: dict, torch_argument: str) -> None:
        """Run function `name` of the file `path`; raises AssertionError with what it raised."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        _send(self._socket, (str(path), name, arguments, torch_argument))
        try:
            failure = _receive(self._socket)
        except EOFError:
            self._process.wait()
            self._log.seek(0)
            failure = f"the process ended with status {self._process.returncode}:\n{self._log.read()[-4000:]}"
        if failure:
            raise AssertionError(failure)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._socket.close()
            self._process.wait(30)

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile("w+", errors="replace")
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, env=self._variables, cwd=ROOT, pass_fds=[theirs.fileno()], stdout=self._log, stderr=self._log
        )
        theirs.close()


def _send(sock: socket.socket, value: object) -> None:
    data = pickle.dumps(value)
    sock.sendall(struct.pack("<Q", len(data)) + data)


def _receive(sock: socket.socket) -> object:
    def read(size: int) -> bytes:
        data = sock.recv(size, socket.MSG_WAITALL)
        if len(data) < size:
            raise EOFError
        return data

    (size,) = struct.unpack("<Q", read(8))
    return pickle.loads(read(size))


def _load(path: str):
    if path not in sys.modules:
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        sys.modules[path] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[path])
    return sys.modules[path]


def serve(sock: socket.socket) -> None:
    """Run what is asked for until the test's end is closed."""
    import torch

    while True:
        try:
            path, name, arguments, torch_argument = _receive(sock)
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            getattr(_load(path), name)(**{torch_argument: torch}, **arguments)
            _send(sock, None)
        except BaseException:
            _send(sock, traceback.format_exc())


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
