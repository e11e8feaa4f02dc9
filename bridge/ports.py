"""Ports of this machine: one that nobody uses, and whether one can be listened on."""

import socket

_END = 1 << 16


def free_port(count: int = 1) -> int:
    """A port of the loopback interface that nobody listens on now; the first of `count` of them in a row."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            following = range(port + 1, port + count)
            if port + count <= _END and not any(listening_error("127.0.0.1", other) for other in following):
                return port


def listening_error(host: str, port: int) -> OSError | None:
    """Why a server could not listen at this address now; None where it could."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None
