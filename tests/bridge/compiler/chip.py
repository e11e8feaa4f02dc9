"""Runs programs as the emulated chip does: through the passes, then on the inner plugin."""

import atexit
import ctypes
import functools
import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pypjrt
from pypjrt import _loader
from service_client import inner_library

import bridge
from bridge.compiler import module as modules
from bridge.compiler import pipeline

VERSION = "1.17.0"
PLUGIN = Path(bridge.__file__).parent / "plugin" / "libtt_tpu_pjrt.so"
# numpy's type to PJRT_Buffer_Type
TYPES = {
    np.dtype(np.bool_): 1,
    np.dtype(np.int32): 4,
    np.dtype(np.int64): 5,
    np.dtype(np.float16): 10,
    np.dtype(np.float32): 11,
    np.dtype(np.float64): 12,
    np.dtype(ml_dtypes.bfloat16): 13,
    np.dtype(np.complex64): 14,
    np.dtype(np.complex128): 15,
}
_NUMPY = {code: dtype for dtype, code in TYPES.items()}


class _InnerLibrary:
    """Our plugin's library, whose GetPjrtApi is that of the inner plugin with our FFI handlers registered."""

    def __init__(self, *arguments, **keywords):
        self._library = _CDLL(*arguments, **keywords)
        self.GetPjrtApi = self._library.GetInnerPjrtApi


_CDLL = ctypes.CDLL


@functools.cache
def client() -> pypjrt.Client:
    # A copy of the library has a configuration of its own: other tests of this process present it as a chip.
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    library = shutil.copy(PLUGIN, folder)
    config = f"backend=emulated\ninner_library={inner_library()}\nstablehlo_version={VERSION}"
    with mock.patch.dict(os.environ, TT_TPU_PLUGIN_CONFIG=config):
        with mock.patch.object(_loader.ctypes, "CDLL", _InnerLibrary):
            return pypjrt.Client.create(pypjrt.Plugin(library), allow_multiple=True)


@functools.cache
def context():
    return modules.make_context()


def rewrite(program: str | bytes, backend: str = "emulated") -> str:
    """The program after the passes, as text."""
    code = program.encode() if isinstance(program, str) else program
    artifact = pipeline.rewrite(context(), code, backend, VERSION).program
    return str(modules.parse(context(), artifact))


def run(program: str | bytes, *arguments: np.ndarray) -> list[np.ndarray]:
    """Rewrite, compile and execute @main; one array a result."""
    code = program.encode() if isinstance(program, str) else program
    return execute(pipeline.rewrite(context(), code, "emulated", VERSION).program, *arguments)


def execute(program: str | bytes, *arguments: np.ndarray) -> list[np.ndarray]:
    """Compile and execute @main as it is, without the passes."""
    executable = client().compile(program)
    with client().device() as device:
        buffers = [to_device(argument, device) for argument in arguments]
    return [to_numpy(result) for result in executable(*buffers)]


def to_device(array: np.ndarray, device: pypjrt.Device) -> pypjrt.Buffer:
    array = np.ascontiguousarray(array)
    return client().buffer_from_host(array.view(np.uint8).reshape(-1), TYPES[array.dtype], array.shape, device)


def to_numpy(buffer: pypjrt.Buffer) -> np.ndarray:
    dtype, shape = _NUMPY[buffer.element_type], buffer.dimensions
    raw = np.empty(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, np.uint8)
    buffer.to_host(raw)
    return raw.view(dtype).reshape(shape)
