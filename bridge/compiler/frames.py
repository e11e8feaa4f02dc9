"""The frames that plugin, compile service and workers exchange over a stream socket.

A frame is `u32 magic | u32 kind | u32 count | count x u64 lengths | blobs`, little
endian, the same in both directions. Standard library only.
"""

import enum
import socket
import struct

MAGIC = 0x31545454
_HEAD = struct.Struct("<III")
_MAX_BLOBS = 16
_MAX_BYTES = 8 << 30


class Kind(enum.IntEnum):
    """What a frame asks or answers; requests and replies share the numbers 1 and 2."""

    HELLO = 0
    COMPILE = 1
    STATS = 2
    EXECUTABLE = 1
    REWRITTEN = 3
    ERROR = 4


class Code(enum.IntEnum):
    """The PJRT_Error_Code values that the service answers with."""

    INVALID_ARGUMENT = 3
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13


class Disconnected(ConnectionError):
    """The peer closed the socket, or sent what is not a frame."""


def send(sock: socket.socket, kind: int, *blobs: bytes) -> None:
    """Write one frame; raises OSError when the peer is gone."""
    lengths = struct.pack(f"<{len(blobs)}Q", *map(len, blobs))
    sock.sendall(_HEAD.pack(MAGIC, kind, len(blobs)) + lengths)
    for blob in blobs:
        sock.sendall(blob)


def receive(sock: socket.socket) -> tuple[int, list[bytes]]:
    """Read one frame: its kind and its blobs; raises Disconnected at the end of the stream."""
    magic, kind, count = _HEAD.unpack(_exactly(sock, _HEAD.size))
    if magic != MAGIC or count > _MAX_BLOBS:
        raise Disconnected(f"not a frame: magic {magic:#x}, {count} blobs")
    lengths = struct.unpack(f"<{count}Q", _exactly(sock, 8 * count))
    if sum(lengths) > _MAX_BYTES:
        raise Disconnected(f"a frame of {sum(lengths)} bytes is larger than {_MAX_BYTES}")
    return kind, [bytes(_exactly(sock, length)) for length in lengths]


def error(code: int, message: str) -> tuple[int, bytes, bytes]:
    """The frame (kind, blobs) of an error reply."""
    return Kind.ERROR, struct.pack("<I", code), message.encode()


def _exactly(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        n = sock.recv_into(view[got:])
        if n == 0:
            raise Disconnected("the peer closed the connection")
        got += n
    return data
