"""The compile service from outside: what a plugin sees on its socket."""

import json
import os
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bridge.compiler import frames
from bridge.compiler.frames import Code, Kind

from service_client import DOUBLE, ONE_DEVICE, ServiceClient, unary

# XLA checks that there is at least one replica, and aborts the process when there is none.
CRASHING_OPTIONS = b""
COLLECTIVE = unary(
    "%r = \"stablehlo.collective_broadcast\"(%x) <{replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}>"
    " : (tensor<4xf32>) -> tensor<4xf32>"
)


def worker_pids(service: ServiceClient) -> list[int]:
    """Children of all threads of the service, as each client's thread starts workers."""
    tasks = Path(f"/proc/{service.process.pid}/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]


def stats(service: ServiceClient) -> dict:
    return json.loads(service.ask(Kind.STATS)[1][0])


def error(reply: tuple[int, list[bytes]]) -> tuple[int, str]:
    kind, (code, message) = reply
    assert kind == Kind.ERROR
    return struct.unpack("<I", code)[0], message.decode()


def test_compile_returns_an_executable_and_its_metadata(service):
    """A program comes back as the inner plugin's serialized executable with the module's name."""
    kind, (executable, metadata) = service.compile(DOUBLE)
    assert kind == Kind.EXECUTABLE and len(executable) > 100
    assert json.loads(metadata) == {"donated": [], "name": "program", "collectives": 0}


def test_metadata_lists_donated_parameters(service):
    """Parameters marked jax.buffer_donor or tf.aliasing_output are named, in order."""
    program = b"""module @m { func.func @main(%a: tensor<2xf32>, %b: tensor<2xf32> {jax.buffer_donor = true},
        %c: tensor<2xf32> {tf.aliasing_output = 0 : i32}) -> tensor<2xf32> {
        %0 = stablehlo.add %b, %c : tensor<2xf32> return %0 : tensor<2xf32> } }"""
    _, (_, metadata) = service.compile(program)
    assert json.loads(metadata)["donated"] == [1, 2]


def test_the_socket_is_private(service):
    """Folder 0700 and socket 0600: no other user can hand in a program."""
    assert stat.S_IMODE(service.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(service.path.stat().st_mode) == 0o600


def test_a_folder_open_to_others_is_refused(tmp_path):
    """A shared folder that others can enter is an error that says what to do."""
    tmp_path.chmod(0o755)
    command = [sys.executable, "-m", "bridge.compiler.service", str(tmp_path / "socket")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and "0700" in done.stderr and "Traceback" not in done.stderr


def test_the_service_ends_with_its_last_client(service):
    """Two seconds after the last connection closed, process, workers, socket and folder are gone."""
    service.compile(DOUBLE)
    workers = worker_pids(service)
    service.hello.close()
    assert service.process.wait(timeout=10) == 0
    assert not service.folder.exists()
    assert workers and not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_the_service_stays_while_a_client_is_connected(service):
    """An idle but open connection keeps the service alive."""
    time.sleep(3.0)
    assert service.process.poll() is None


def test_a_second_service_on_the_same_path_gives_way(service):
    """It ends quietly with status 0 and the first goes on."""
    assert service.start().wait(timeout=10) == 0
    assert service.compile(DOUBLE)[0] == Kind.EXECUTABLE


def test_sigterm_leaves_nothing(service):
    """SIGTERM ends service and workers and removes the socket."""
    service.compile(DOUBLE)
    workers = worker_pids(service)
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(timeout=10) == 0
    assert not service.folder.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_a_crash_is_that_programs_error(service):
    """An abort inside XLA becomes an INTERNAL error with the end of the worker's log."""
    code, message = error(service.compile(DOUBLE, CRASHING_OPTIONS))
    assert code == Code.INTERNAL
    assert "SIGABRT" in message and "Check failed" in message


def test_a_crashed_worker_is_replaced(service):
    """The program after a crash compiles, on another worker."""
    service.compile(DOUBLE)
    before = worker_pids(service)
    service.compile(DOUBLE, CRASHING_OPTIONS)
    assert service.compile(unary("%r = stablehlo.negate %x : tensor<4xf32>"))[0] == Kind.EXECUTABLE
    assert set(worker_pids(service)).isdisjoint(before)
    assert stats(service)["workers_restarted"] == 1


def test_a_crash_spares_programs_that_compile_beside_it(service):
    """While one worker aborts, another program's compile succeeds."""
    replies = {}

    def run(name, options):
        replies[name] = service.compile(DOUBLE, options)[0]

    threads = [threading.Thread(target=run, args=item) for item in (("bad", CRASHING_OPTIONS), ("good", ONE_DEVICE))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == {"bad": Kind.ERROR, "good": Kind.EXECUTABLE}


def test_a_worker_that_ended_while_idle_costs_no_program(service):
    """A worker that was killed between two programs is replaced unseen."""
    service.compile(DOUBLE)
    for pid in worker_pids(service):
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    assert service.compile(unary("%r = stablehlo.negate %x : tensor<4xf32>"))[0] == Kind.EXECUTABLE


def test_many_programs_at_once_share_few_workers(service):
    """Eight clients at once are all served by at most two workers."""
    kinds = []
    programs = [unary(f"%r = stablehlo.add %x, %x : tensor<{n}xf32>", f"{n}xf32") for n in range(1, 9)]
    threads = [threading.Thread(target=lambda p=p: kinds.append(service.compile(p)[0])) for p in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kinds == [Kind.EXECUTABLE] * 8
    assert len(worker_pids(service)) <= 2
    assert stats(service)["compiled"] == 8


def test_a_client_that_leaves_does_not_hold_a_worker(service):
    """A client that disconnects in the middle of its compile frees the worker for the next one."""
    for _ in range(3):
        with service.connect() as sock:
            frames.send(sock, Kind.COMPILE, DOUBLE, b"mlir", ONE_DEVICE)
    assert service.compile(DOUBLE)[0] == Kind.EXECUTABLE


def test_a_refused_program_is_an_error_with_its_name(service):
    """A collective on a single chip is UNIMPLEMENTED, and the worker goes on."""
    code, message = error(service.compile(COLLECTIVE))
    assert code == Code.UNIMPLEMENTED and "collective_broadcast" in message and "tensor<4xf32>" in message
    assert service.compile(DOUBLE)[0] == Kind.EXECUTABLE
    assert stats(service)["workers_restarted"] == 0


@pytest.mark.parametrize("program", [b"", b"not a module", b"ML\xefR\x06StableHLO_v1.17.0\0garbage"])
def test_what_is_not_stablehlo_is_an_error(service, program):
    """Garbage instead of a program is an error that says so, and no crash."""
    _, message = error(service.compile(program))
    assert "not StableHLO" in message


def test_another_format_is_an_error(service):
    """HLO protos and other formats are refused by name."""
    _, message = error(service.ask(Kind.COMPILE, DOUBLE, b"hlo", ONE_DEVICE))
    assert "'hlo'" in message


def test_an_unknown_request_is_an_error(service):
    """A request of a newer plugin is answered, not dropped."""
    code, message = error(service.ask(77, b"x"))
    assert code == Code.INVALID_ARGUMENT and "77" in message


def test_noise_on_the_socket_ends_that_connection_only(service):
    """A peer that does not speak the protocol is cut off; others are served."""
    with service.connect() as sock:
        sock.settimeout(10)
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        try:
            assert sock.recv(1) == b""
        except ConnectionResetError:
            pass
    assert service.compile(DOUBLE)[0] == Kind.EXECUTABLE


def test_libtt_gets_the_rewritten_program(tmp_path):
    """For an inner plugin that owns its chip the reply is StableHLO, not an executable."""
    service = ServiceClient(tmp_path, backend="libtt")
    try:
        kind, (program, _) = service.compile(DOUBLE)
        assert kind == Kind.REWRITTEN and program.startswith(b"ML\xefR") and b"StableHLO_v" in program[:32]
    finally:
        service.close()


def test_the_manager_imports_nothing_heavy():
    """The service process itself stays light: neither MLIR nor numpy is loaded."""
    heavy = "('jaxlib', 'numpy', 'pypjrt', 'torch')"
    code = f"import sys, bridge.compiler.service; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
