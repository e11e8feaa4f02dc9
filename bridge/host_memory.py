"""Memory of this process that is free, but that the allocator keeps.

glibc keeps what was freed for the next allocation. After a model's weights have
gone to the chip, or a program has been compiled, that is hundreds of megabytes
that nobody will want again.
"""

import ctypes

# Of glibc alone; other allocators look after themselves.
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back() -> None:
    """Give free memory back to the system. Takes some milliseconds, so it is for the end of a large piece of work."""
    if _trim is not None:
        _trim(0)
