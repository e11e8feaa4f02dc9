"""Compiled programs on disk, found again by what they were compiled from.

One file a program in a folder of the stamp, which names everything else that a compiled
program depends on (see bridge.backend): what another version, plugin or CPU left is never
looked at. A damaged file is a miss. Standard library only.
"""

import hashlib
import os
import struct
import tempfile
from pathlib import Path

_MAGIC = b"TTPROG1\n"
_LENGTHS = struct.Struct("<IQQ")
_PRUNE_EVERY = 64


class ProgramStore:
    """A bounded folder of replies of the compile service.

    Args:
        folder: made with mode 0700 when the first program is kept.
        stamp: name of everything a program depends on but the program and its options.
        limit: bytes of all stamps together; the programs that were used longest ago go first.
    """

    def __init__(self, folder: Path, stamp: str, limit: int = 2 << 30):
        self._root, self._folder, self._limit = folder, folder / stamp, limit
        self._kept = 0

    @staticmethod
    def key(*parts: bytes) -> str:
        """The name of what is compiled from `parts`: program, format and options."""
        digest = hashlib.sha256()
        for part in parts:
            digest.update(struct.pack("<Q", len(part)) + part)
        return digest.hexdigest()

    def find(self, key: str) -> tuple[int, list[bytes]] | None:
        """The reply (kind, blobs) kept under `key`, or None."""
        path = self._folder / key
        try:
            data = path.read_bytes()
        except OSError:
            return None
        reply = _decode(data)
        if reply is None:
            path.unlink(missing_ok=True)
        else:
            _touch(path)
        return reply

    def keep(self, key: str, kind: int, blobs: list[bytes]) -> None:
        """Keep a reply of two blobs; a disk that cannot take it is no error, as the store only saves time."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".", delete=False) as file:
                try:
                    file.write(_encode(kind, blobs))
                    file.flush()
                    os.replace(file.name, self._folder / key)
                except OSError:
                    os.unlink(file.name)
                    raise
            if self._kept % _PRUNE_EVERY == 0:
                self._prune()
            self._kept += 1
        except OSError:
            pass

    def _prune(self) -> None:
        """Remove what was used longest ago until the rest fits."""
        files = []
        for path in self._root.glob("*/*"):
            try:
                stat = path.stat()
            except OSError:
                continue  # another service was faster
            files.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self._limit:
                return
            path.unlink(missing_ok=True)
            total -= size


def _encode(kind: int, blobs: list[bytes]) -> bytes:
    first, second = blobs
    body = _LENGTHS.pack(kind, len(first), len(second)) + first + second
    return _MAGIC + hashlib.sha256(body).digest() + body


def _decode(data: bytes) -> tuple[int, list[bytes]] | None:
    magic, digest, body = data[:8], data[8:40], data[40:]
    if magic != _MAGIC or hashlib.sha256(body).digest() != digest:
        return None
    kind, first, second = _LENGTHS.unpack_from(body)
    start = _LENGTHS.size
    return kind, [body[start : start + first], body[start + first : start + first + second]]


def _touch(path: Path) -> None:
    try:
        os.utime(path)
    except OSError:
        pass  # removed meanwhile, or not ours: the age then stays as it is
