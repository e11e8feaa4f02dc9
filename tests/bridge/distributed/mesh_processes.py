"""The processes of a mesh, each with one emulated chip, that run functions of test modules.

What a test wants of every rank is a function of its module whose first argument is the rank's `Chip`.
The processes are started once for many tests; run as a program, this file is one of them.
"""

import contextlib
import functools
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from bridge.ports import free_port

ROOT = Path(__file__).resolve().parents[3]


def environment(folder: Path, world: int, hosts: int = 1, **variables: str) -> dict[str, str]:
    """What the ranks of one mesh share; nothing of a mesh that these tests may run in themselves.

    Args:
        hosts: between so many parts of the mesh nothing goes but through the network, though all are on this machine.
    """
    ours = ("LIBTT", "TT_TPU", "TPU", "TORCH", "RANK", "LOCAL", "WORLD", "MASTER")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return clean | {
        "TT_TPU_BACKEND": "emulated", "TT_TPU_CACHE_DIR": str(folder), "TMPDIR": str(folder), "PYTHONWARNINGS": "ignore",
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world // hosts), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "TORCH_TPU_SLICEBUILDER_ADDRESSES": f"127.0.0.1:{free_port()}",
        "TORCH_TPU_TOPOLOGY": f"{world},1,1", "OMP_NUM_THREADS": "1", **variables,
    }  # fmt: skip


@dataclass
class Answer:
    """What one rank said of a call: what the function returned, or the text of what it raised."""

    value: object = None
    error: str = ""


class Rank:
    """One process of the mesh, seen from the test."""

    def __init__(self, rank: int, variables: dict[str, str], before: tuple[str, ...] = ()):
        self.rank = rank
        self._log = tempfile.TemporaryFile("w+", errors="replace")
        self._pipe, theirs = Pipe()
        command = [*before, sys.executable, __file__, str(theirs.fileno())]
        numbered = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank % int(variables["LOCAL_WORLD_SIZE"]))}
        self.process = subprocess.Popen(
            command, env=numbered | variables, cwd=ROOT, pass_fds=[theirs.fileno()], stdout=self._log, stderr=self._log
        )
        theirs.close()

    def ask(self, function: Callable, arguments: dict) -> None:
        """Send a call; `answer` waits for what comes of it."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send((function.__code__.co_filename, function.__name__, arguments))

    def answer(self, seconds: float = 120) -> Answer:
        """The answer to the oldest call; AssertionError when the process has ended or says nothing."""
        try:
            if self._pipe.poll(seconds):
                return self._pipe.recv()
        except (EOFError, ConnectionError):
            raise AssertionError(f"rank {self.rank} ended with status {self.process.wait(10)}:\n{self.log()}") from None
        raise AssertionError(f"rank {self.rank} did not answer within {seconds} s:\n{self.log()}")

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()[-3000:]

    def close(self) -> None:
        self._pipe.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


class MeshProcesses:
    """All processes of a mesh.

    Args:
        folder: for their caches and temporary files.
        world: how many there are.
        per_rank: variables of each alone.
        hosts: as in `environment`.
        before: of each host, what its processes are started by: a command and its first arguments.
        variables: of all.
    """

    def __init__(
        self, folder: Path, world: int, per_rank: tuple[dict[str, str], ...] = (), hosts: int = 1,
        before: tuple[tuple[str, ...], ...] = (), **variables: str,
    ):  # fmt: skip
        shared = environment(folder, world, hosts, **variables)
        each = per_rank or ({},) * world
        prefixes = before or ((),) * hosts
        self.ranks = [Rank(rank, shared | own, prefixes[rank * hosts // world]) for rank, own in enumerate(each)]

    def run(self, function: Callable, ranks: list[int] | None = None, **arguments) -> list:
        """Call `function(chip, **arguments)` on every rank; what each returned. Raises what a rank raised."""
        answers = self.answers(function, ranks, **arguments)
        errors = [f"rank {rank}: {answer.error}" for rank, answer in answers.items() if answer.error]
        assert not errors, "\n".join(errors)
        return [answer.value for answer in answers.values()]

    def answers(self, function: Callable, ranks: list[int] | None = None, seconds: float = 120, **arguments) -> dict[int, Answer]:
        """As `run`, with an error as an answer."""
        chosen = [self.ranks[rank] for rank in (ranks if ranks is not None else range(len(self.ranks)))]
        for rank in chosen:
            rank.ask(function, arguments)
        return {rank.rank: rank.answer(seconds) for rank in chosen}

    def kill(self, rank: int) -> None:
        """End a rank's process at once."""
        self.ranks[rank].process.send_signal(signal.SIGKILL)
        self.ranks[rank].process.wait()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


# ---- In a rank's process


class Chip:
    """A rank's chip, without torch: compiles and runs StableHLO for all ranks of the mesh."""

    def __init__(self):
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._programs = {}

    @functools.cached_property
    def client(self):
        """The PJRT client, which meets the other ranks when it is made."""
        import pypjrt

        from bridge.backend import PLUGIN

        return pypjrt.Client.create(pypjrt.Plugin(PLUGIN))

    @functools.cached_property
    def torch(self):
        """torch, with this rank's chip as "tpu" and all ranks as its default group."""
        import torch

        torch.distributed.init_process_group("cpu:gloo,tpu:tpu_dist")
        torch.set_num_threads(1)
        return torch

    def compiled_programs(self) -> int:
        """How many programs this process has compiled or had compiled."""
        import ctypes

        from bridge.backend import PLUGIN

        return ctypes.CDLL(str(PLUGIN)).TtTpuCompiledProgramCount()

    def compile(self, program: str, replicas: int = 1, assignment: bytes | None = None):
        """A program for all ranks: one partition each, or one replica each."""
        import pypjrt

        if (program, replicas) not in self._programs:
            counts = {"num_replicas": replicas} if replicas > 1 else {"num_partitions": self.world}
            options = pypjrt.CompileOptions(device_assignment=assignment, use_spmd_partitioning=True, **counts)
            self._programs[program, replicas] = self.client.compile(program, options=options)
        return self._programs[program, replicas]

    def run(self, program, *arrays):
        """Execute a program (its text, or compiled) on this rank's arrays; its results."""
        from plain_arrays import from_device, to_device

        loaded = self.compile(program) if isinstance(program, str) else program
        with self.client.device() as device:
            buffers = [to_device(self.client, device, array) for array in arrays]
            return [from_device(result) for result in loaded(*buffers)]


def _serve(pipe: Connection) -> None:
    chip = Chip()
    while True:
        try:
            path, name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = Answer(_function(path, name)(chip, **arguments))
        except Exception as error:
            answer = Answer(error=f"{error}\n{traceback.format_exc()}")
        pipe.send(answer)


@functools.cache
def _function(path: str, name: str) -> Callable:
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


if __name__ == "__main__":
    # Pickled answers name this module as the test knows it.
    sys.modules["mesh_processes"] = sys.modules["__main__"]
    Answer.__module__ = "mesh_processes"
    sys.path.insert(0, str(ROOT))
    _serve(Connection(int(sys.argv[1])))
    # A mesh's processes end at different times: nothing waits for anything here.
    time.sleep(0)
    os._exit(0)
