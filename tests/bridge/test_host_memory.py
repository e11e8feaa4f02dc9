"""Freed memory goes back to the system when it is asked for."""

import psutil

from bridge import host_memory


def test_what_was_freed_below_something_in_use_is_given_back():
    """128 MiB of pieces too small to be mappings of their own, with one in use above them, which keeps the heap there."""
    process = psutil.Process()
    before = process.memory_info().rss
    pieces = [bytearray(b"x" * 65536) for _ in range(2048)]
    in_use = pieces.pop()
    del pieces
    host_memory.give_back()
    assert process.memory_info().rss - before < 32 << 20
    assert len(in_use) == 65536
