"""What the plugin does beside PJRT's functions, for the other parts of the bridge."""

import ctypes
import functools

from bridge.backend import PLUGIN
from bridge.errors import MeshError

_TEXT_BYTES = 2000


def expect_message(key: bytes, source: int) -> int:
    """Announce that this thread's next receive is of the message of this key, at most 64 bytes, from a rank of the mesh.

    Returns:
        The message's number, no other's that this process expects meanwhile; its sender is told it too.
    """
    return _library().TtTpuExpectMessage(key, source)


def await_receiver(key: bytes, destination: int) -> int:
    """Wait until a rank of the mesh expects the message of this key; the number that it has given to it.

    Raises:
        MeshError: the rank has ended, or did not come in time.
    """
    problem = ctypes.create_string_buffer(_TEXT_BYTES)
    number = _library().TtTpuAwaitReceiver(key, destination, problem, len(problem))
    if problem.value:
        raise MeshError(problem.value.decode(errors="replace"))
    return number


def await_lost_rank() -> str:
    """Wait until a rank on another host has ended; which one it was. For ever, where there is no other host."""
    lost = ctypes.create_string_buffer(_TEXT_BYTES)
    _library().TtTpuAwaitLostRank(lost, len(lost))
    return lost.value.decode(errors="replace")


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(PLUGIN))
    library.TtTpuExpectMessage.argtypes = (ctypes.c_char_p, ctypes.c_int)
    library.TtTpuAwaitReceiver.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
    library.TtTpuAwaitLostRank.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
    library.TtTpuAwaitLostRank.restype = None
    return library
