"""What is left of a server that has ended."""

from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")


def alive(process: psutil.Process) -> bool:
    """Whether it still runs; one that ended and waits for its parent to notice does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def orphaned(segments: set[Path]) -> set[Path]:
    """Those that no living process has mapped: another program of this machine may have made the rest meanwhile.

    Told apart by inode: glibc maps a semaphore under another name than the one it keeps.
    """
    held = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            held |= {int(line.split()[4]) for line in maps.read_text().splitlines() if "/dev/shm/" in line}
        except OSError:
            continue
    return {segment for segment in segments if segment.exists() and segment.stat().st_ino not in held}
