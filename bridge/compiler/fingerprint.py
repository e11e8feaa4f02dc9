"""The version stamp of what a compile depends on, computed without importing any of it.

An executable made by other passes, another inner plugin or for another CPU must never be
taken for ours, so its stamp names all three. Standard library only: the user's process
computes the fingerprint at start.
"""

import functools
import hashlib
import platform
from importlib import metadata
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
# Composites of calls have their meaning on the emulated chip in kernels_replacements.
_SOURCES = ("bridge/compiler/*.py", "bridge/emulator/*.py", "bridge/plugin/*.so", "kernels_replacements/*.py")
_PACKAGES = ("jaxlib", "jax")


@functools.cache
def passes_fingerprint() -> str:
    """16 hexadecimal digits that change with the passes, our FFI handlers or the version of jaxlib or JAX."""
    digest = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(_ROOT.glob(pattern)):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for package in _PACKAGES:
        digest.update(metadata.version(package).encode())
    return digest.hexdigest()[:16]


@functools.cache
def cpu_fingerprint() -> str:
    """16 hexadecimal digits of the instruction sets that this machine's CPU offers.

    Source: the "flags" (x86) or "Features" (Arm) line of /proc/cpuinfo.
    """
    features = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            features += " ".join(sorted(value.split()))
            break
    return hashlib.sha256(features.encode()).hexdigest()[:16]
