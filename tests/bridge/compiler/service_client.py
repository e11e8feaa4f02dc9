"""A client of the compile service for tests, and small programs to hand to it."""

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bridge.compiler import frames
from bridge.compiler.frames import Kind

# CompileOptionsProto: executable_build_options {num_replicas: 1, num_partitions: 1}
ONE_DEVICE = bytes.fromhex("1a0420012801")


def inner_library() -> Path:
    """The emulated chip's inner plugin, found without importing it."""
    package = importlib.util.find_spec("lammps_jax_pjrt_cpu").submodule_search_locations[0]
    return Path(package) / "pjrt_c_api_cpu_plugin.so"


def unary(body: str, shape: str = "4xf32", name: str = "program") -> bytes:
    """A module whose @main computes %r from %x with `body`, both of one type."""
    tensor = f"tensor<{shape}>"
    return (
        f"module @{name} {{ func.func @main(%x: {tensor}) -> {tensor} {{ {body} return %r : {tensor} }} }}"
    ).encode()


DOUBLE = unary("%r = stablehlo.add %x, %x : tensor<4xf32>")


class ServiceClient:
    """A running service and the connection that keeps it alive."""

    def __init__(self, cache: Path, workers: int = 2, backend: str = "emulated", fingerprint: str = "test"):
        self.folder = Path(tempfile.mkdtemp(prefix="tt-tpu-test-"))
        self.path = self.folder / "socket"
        config = {
            "backend": backend,
            "inner_library": inner_library(),
            "fingerprint": fingerprint,
            "stablehlo_version": "1.17.0",
        }
        self.environment = {
            **os.environ,
            "TT_TPU_PLUGIN_CONFIG": "".join(f"{key}={value}\n" for key, value in config.items()),
            "TT_TPU_COMPILE_WORKERS": str(workers),
            "TT_TPU_CACHE_DIR": str(cache),
        }
        self.process = self.start()
        self.hello = self.connect()
        frames.send(self.hello, Kind.HELLO)

    def start(self) -> subprocess.Popen:
        command = [sys.executable, "-m", "bridge.compiler.service", str(self.path)]
        return subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL)

    def connect(self, seconds: float = 30.0) -> socket.socket:
        deadline = time.monotonic() + seconds
        while True:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.connect(str(self.path))
                return sock
            except OSError:
                sock.close()
                assert self.process.poll() is None, "the service ended before it listened"
                assert time.monotonic() < deadline, "the service does not listen"
                time.sleep(0.01)

    def ask(self, kind: int, *blobs: bytes) -> tuple[int, list[bytes]]:
        with self.connect() as sock:
            sock.settimeout(120)
            frames.send(sock, kind, *blobs)
            return frames.receive(sock)

    def compile(self, program: bytes, options: bytes = ONE_DEVICE) -> tuple[int, list[bytes]]:
        return self.ask(Kind.COMPILE, program, b"mlir", options)

    def close(self) -> None:
        self.hello.close()
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(timeout=10)
