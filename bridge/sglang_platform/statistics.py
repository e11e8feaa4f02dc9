"""What a server tells of its programs at /server_info."""

import ctypes
from typing import Any

from bridge.settings import load


def compiled_programs() -> int | None:
    """Programs that this process had compiled so far; None under a plugin that does not count."""
    library = load().tpu_library
    try:
        count = ctypes.CDLL(str(library)).TtTpuCompiledProgramCount
    except (OSError, AttributeError):
        return None
    count.restype = ctypes.c_ulong
    return count()


def add_counts(result: Any, *_arguments: Any) -> None:
    """AFTER InternalState.get_internal_state: a number that stands still in steady decode."""
    result.internal_state["compiled_programs"] = compiled_programs()
