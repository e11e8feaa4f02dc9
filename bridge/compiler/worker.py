"""One compile worker: programs in, executables out, over the socket whose number is its argument.

Runs the passes and compiles on the inner plugin in a process of its own, so that an abort
inside a compiler ends this process and not the server. Ends when the socket is closed.
"""

import json
import os
import socket
import sys
from pathlib import Path

from bridge import host_memory
from bridge.compiler import frames
from bridge.compiler.config import parse_config
from bridge.compiler.frames import Code, Kind
from bridge.compiler.options import exact
from bridge.compiler.placement import parse
from bridge.errors import CompileError


class Worker:
    """Holds what is expensive to make: the MLIR context and the inner plugin's client."""

    def __init__(self, backend: str, library: Path, version: str):
        # Both are imported here and not above: a missing jaxlib or pypjrt is then an
        # error reply with its name, like everything else that goes wrong in a worker.
        from bridge.compiler import module, pipeline

        self._rewrite = pipeline.rewrite
        self._context = module.make_context()
        self._backend, self._version = backend, version
        self._inner = None
        if backend == "emulated":
            from bridge.compiler.inner import InnerPlugin

            self._inner = InnerPlugin(library)

    def answer(self, program: bytes, form: str, options: bytes, placement: str = "") -> tuple[int, bytes, bytes]:
        """The reply frame (kind, blobs) to one compile request; `placement` as bridge.compiler.placement has it."""
        if form != "mlir":
            raise CompileError(f"program format {form!r} is not supported: hand in StableHLO as 'mlir'")
        placed = parse(placement)
        rewritten = self._rewrite(self._context, program, self._backend, self._version, placed)
        named = {"donated": rewritten.donated, "name": rewritten.name, "collectives": rewritten.collectives}
        metadata = json.dumps(named).encode()
        if self._inner is None:
            return Kind.REWRITTEN, rewritten.program, metadata
        return Kind.EXECUTABLE, self._inner.compile(rewritten.program, form, exact(options), placed.here), metadata


def explain(error: Exception) -> tuple[int, bytes, bytes]:
    """The error frame for whatever a compile raised."""
    code = getattr(error, "code", None)
    if isinstance(error, CompileError):
        return frames.error(Code.UNIMPLEMENTED, str(error))
    if isinstance(code, int):
        return frames.error(code, str(error))
    return frames.error(Code.INTERNAL, f"the compiler failed: {type(error).__name__}: {error}")


def library(settings: dict[str, str]) -> Path:
    """Our plugin, which hands out the inner one with our FFI handlers registered, or the inner one alone."""
    ours = Path(__file__).resolve().parent.parent / "plugin" / "libtt_tpu_pjrt.so"
    return ours if ours.exists() else Path(settings["inner_library"])


def serve(sock: socket.socket, settings: dict[str, str]) -> None:
    """Answer compile requests until the manager closes the socket."""
    worker = None
    while True:
        try:
            _, (program, form, options, *placement) = frames.receive(sock)
        except frames.Disconnected:
            return
        try:
            worker = worker or Worker(settings["backend"], library(settings), settings["stablehlo_version"])
            reply = worker.answer(program, form.decode(), options, *map(bytes.decode, placement))
        except Exception as error:  # whatever it is, it is this program's error and not the worker's end
            reply = explain(error)
        frames.send(sock, *reply)
        host_memory.give_back()


if __name__ == "__main__":
    descriptor = socket.socket(fileno=int(sys.argv[1]))
    serve(descriptor, parse_config(os.environ["TT_TPU_PLUGIN_CONFIG"]))
    # The inner plugin's threads and static destructors have nothing left to say.
    os._exit(0)
