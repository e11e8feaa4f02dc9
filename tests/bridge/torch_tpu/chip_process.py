"""A process in which torch sees the chip and which runs test functions one after the other.

pytest's own process has no chip, and what a program imports cannot be undone: so the tests of
one module share a process like this one, started once, and only those that need an interpreter
of their own pay for it. Run as a program it is that process.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import traceback
from multiprocessing.connection import Connection, Pipe
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
        self._pipe.send((str(path), name, arguments, torch_argument))
        try:
            failure = self._pipe.recv()
        except EOFError:
            self._process.wait()
            self._log.seek(0)
            failure = f"the process ended with status {self._process.returncode}:\n{self._log.read()[-4000:]}"
        if failure:
            raise AssertionError(failure)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._pipe.close()
            self._process.wait(30)

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        self._log = tempfile.TemporaryFile("w+", errors="replace")
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, env=self._variables, cwd=ROOT, pass_fds=[theirs.fileno()], stdout=self._log, stderr=self._log
        )
        theirs.close()


def _load(path: str):
    if path not in sys.modules:
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        sys.modules[path] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[path])
    return sys.modules[path]


def serve(pipe: Connection) -> None:
    """Run what is asked for until the test's end is closed."""
    import torch

    while True:
        try:
            path, name, arguments, torch_argument = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            getattr(_load(path), name)(**{torch_argument: torch}, **arguments)
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
