"""A server that loses a process, or cannot start: it ends with status 1 and the cause as its last line, and leaves nothing."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import random_models
import requests
from leftovers import alive

from bridge.ports import free_port
from launch.server import Address, command, environment

OPTIONS = (
    "--dtype", "float32", "--page-size", "32", "--context-length", "1024", "--max-total-tokens", "4096",
    "--tpu-compile-bs", "1", "--grammar-backend", "none", "--skip-tokenizer-init",
)  # fmt: skip
SECONDS = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model's folder."""
    folder = tmp_path_factory.mktemp("crash") / "model"
    random_models.make("qwen3", folder, num_hidden_layers=1)
    return folder


class Crashing:
    """A server that is going to end.

    Attributes:
        process: plain `python -m sglang.launch_server`, or `tt-tpu serve`.
        address: where it answers.
    """

    def __init__(self, arguments: list[str], address: Address, folder: Path, **variables: str):
        self.address, self._log, self._temporary = address, folder / "log", folder / "t"
        self._temporary.mkdir()
        self._segments = set()
        own = environment() | {"TMPDIR": str(self._temporary)} | variables
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(arguments, env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def scheduler(self, title: str) -> psutil.Process:
        """A scheduler by its process's title, as soon as it is there."""
        for _ in self.waiting():
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if f"sglang::scheduler_{title}" in "".join(process.cmdline()[:1]):
                        return process

    def waiting(self) -> Iterator[None]:
        """Again and again, as long as it is worth waiting."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            yield
            time.sleep(0.1)
        raise AssertionError(f"waited in vain:\n{self.log()}")

    def note_segments(self) -> None:
        """Remember what its processes have in shared memory now; others on this machine have theirs."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                self._segments |= {Path(file.path) for file in process.memory_maps() if file.path.startswith("/dev/shm/")}

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-5000:]

    def last_line(self, seconds: float) -> str:
        """What the server ends with, within `seconds`, after which nothing of it may be there."""
        others = self.processes()
        assert self.process.wait(seconds) == 1, self.log()
        psutil.wait_procs(others, timeout=5)
        assert not [process for process in others if alive(process)]
        assert not [segment for segment in self._segments if segment.exists()]
        assert not list(self._temporary.iterdir())
        return self.log().splitlines()[-1]


@pytest.fixture
def start(model, tmp_path):
    """start(command line, **variables): a server of the model."""
    started = []

    def start(make, **variables: str) -> Crashing:
        address = Address("127.0.0.1", free_port())
        started.append(Crashing(make(str(model), address), address, tmp_path, **variables))
        return started[-1]

    yield start
    for server in started:
        server.process.kill()
        server.process.wait()


def plain(*options: str):
    """SGLang's own command line."""
    return lambda model, address: command(model, address, [*OPTIONS, *options])


def tt_tpu(*options: str):
    """Ours."""
    serve = [sys.executable, "-m", "launch.cli", "serve"]
    return lambda model, address: [*serve, model, "--port", str(address.port), *OPTIONS, *options]


def ask_without_end(address: Address) -> None:
    """A request that is not answered before the server ends."""
    body = {"input_ids": [5] * 20, "sampling_params": {"max_new_tokens": 900, "ignore_eos": True}}
    with contextlib.suppress(requests.RequestException):
        requests.post(f"{address}/generate", json=body, timeout=SECONDS)


@pytest.mark.parametrize(
    ("moment", "make", "title", "name"),
    [
        ("start", plain("--tp-size", "2"), "TP1", "rank 1"),
        ("idle", tt_tpu("--chips", "4", "--dp-size", "2"), "DP1_TP0", "rank 0 of replica 1"),
        ("load", plain("--tp-size", "2"), "TP1", "rank 1"),
    ],
    ids=["start", "idle", "load"],
)
def test_a_killed_rank(start, moment, make, title, name):
    """Whenever a scheduler is killed, the server is out within five seconds and says which rank it was."""
    server = start(make)
    victim = server.scheduler(title)
    if moment != "start":
        next(None for _ in server.waiting() if server.address.answers())
    if moment == "load":
        for _ in range(2):
            threading.Thread(target=ask_without_end, args=(server.address,), daemon=True).start()
        time.sleep(1)
    server.note_segments()
    victim.kill()
    assert server.last_line(5).startswith(f"error: {name} (process {victim.pid}) was ended by SIGKILL")


def test_a_chip_that_is_too_small(start):
    """One line says how much is there, and what to change; nothing else does."""
    server = start(plain(), TT_TPU_EMULATED_MEMORY="4M")
    last = server.last_line(SECONDS)
    assert last.startswith("error: rank 0: there is no room for a KV cache")
    assert all(part in last for part in ("of the chip's 4.0 MiB", "--tp-size", "TT_TPU_EMULATED_MEMORY"))
    assert "Traceback" not in server.log()
