"""The compile service: a light process that hands programs to workers and answers over a private socket.

Started by the plugin as `python -m bridge.compiler.service PATH`, shared by all processes
of a mesh, gone as soon as its last client is. A worker that dies is that one program's
error, with the end of its log, and is replaced. Standard library only.
"""

import contextlib
import fcntl
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from bridge import settings as bridge_settings
from bridge.compiler import frames
from bridge.compiler.config import parse_config
from bridge.compiler.frames import Code, Kind
from bridge.compiler.store import ProgramStore

# Long enough for a forked or exec-ed client to connect again, too short to be seen after a server has ended.
LINGER_SECONDS = 0.25
_FIRST_CLIENT_SECONDS = 30.0
_TAIL_BYTES = 4000


class WorkerDied(Exception):
    """A worker ended in the middle of a program; the message is its exit and the end of its log."""


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class WorkerProcess:
    """One worker process, its socket, and the unnamed file that takes its stderr."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile(mode="ab+", buffering=0)
        # A worker is no user of the chip: it must not present itself as one.
        environment = {**os.environ, "LIBTT_TPU_COMPAT": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "bridge.compiler.worker", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment,
        )
        theirs.close()
        self._sock = ours

    def compile(self, blobs: list[bytes], client: socket.socket) -> tuple[int, list[bytes]]:
        """Send one program and wait for its reply.

        Raises:
            WorkerDied: the process ended instead of answering.
            ClientGone: `client` hung up while the program was compiling.
        """
        self._log.truncate(0)
        try:
            frames.send(self._sock, Kind.COMPILE, *blobs)
            self._wait(client)
            return frames.receive(self._sock)
        except (OSError, frames.Disconnected) as error:
            raise WorkerDied(self._last_words()) from error

    def alive(self) -> bool:
        """Whether the process is still there."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process, whatever it is doing; who waits for its reply learns it from the socket."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End the process and give back what it held."""
        self.kill()
        self._sock.close()
        self._log.close()

    def _wait(self, client: socket.socket) -> None:
        """Until the worker has something to say; a client sends nothing more, so its readiness means it left."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            selector.register(client, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select()]
        if self._sock not in ready:
            raise ClientGone

    def _last_words(self) -> str:
        status = self._process.wait()
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace")
        return f"{how}; the end of its log:\n{tail.strip() or '(empty)'}"


class WorkerPool:
    """At most `limit` workers, started on demand; the one used last is used next, as it is warm."""

    def __init__(self, limit: int):
        self._idle: list[WorkerProcess] = []
        self._all: set[WorkerProcess] = set()
        self._slots = threading.BoundedSemaphore(limit)
        self._lock = threading.Lock()
        self._closed = False

    def warm(self) -> None:
        """Start the first worker, so that it loads while the client prepares its first program."""
        with self._lock:
            if not self._all and not self._closed:
                self._idle.append(self._start())

    def compile(self, blobs: list[bytes], client: socket.socket) -> tuple[int, list[bytes]]:
        """Compile on a free worker, waiting for one; raises WorkerDied or ClientGone."""
        with self._slots:
            worker = self._take()
            try:
                reply = worker.compile(blobs, client)
            except BaseException:
                with self._lock:
                    self._all.discard(worker)
                worker.stop()
                raise
            self._give_back(worker)
            return reply

    def close(self) -> None:
        """End all workers, busy ones too."""
        with self._lock:
            self._closed = True
            workers, self._all = self._all, set()
        for worker in workers:
            worker.kill()

    def _take(self) -> WorkerProcess:
        with self._lock:
            if self._closed:
                raise ClientGone
            while self._idle:
                worker = self._idle.pop()
                if worker.alive():
                    return worker
                # Ended while it had nothing to do, as by the kernel when memory ran out: no program's fault.
                self._all.discard(worker)
                worker.stop()
            return self._start()

    def _start(self) -> WorkerProcess:
        worker = WorkerProcess()
        self._all.add(worker)
        return worker

    def _give_back(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._idle.append(worker)


class KeyedLocks:
    """A lock for each key that somebody holds or waits for."""

    def __init__(self):
        self._lock = threading.Lock()
        self._held: dict[str, tuple[threading.Lock, int]] = {}

    @contextlib.contextmanager
    def holding(self, key: str) -> Iterator[None]:
        with self._lock:
            lock, users = self._held.get(key, (threading.Lock(), 0))
            self._held[key] = lock, users + 1
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, users = self._held.pop(key)
                if users > 1:
                    self._held[key] = lock, users - 1


class Service:
    """Answers clients, one thread each, and counts what it did."""

    def __init__(self, pool: WorkerPool, store: ProgramStore):
        self._pool, self._store = pool, store
        self._compiling = KeyedLocks()
        self._lock = threading.Lock()
        self._counts = {"compiled": 0, "failed": 0, "store_hits": 0, "workers_restarted": 0}
        self._clients = 0
        self._alone_since = time.monotonic() + _FIRST_CLIENT_SECONDS - LINGER_SECONDS

    def run(self, listener: socket.socket) -> None:
        """Accept clients until the last one has been gone for LINGER_SECONDS."""
        listener.settimeout(LINGER_SECONDS / 4)
        while not self._abandoned():
            try:
                client, _ = listener.accept()
            except TimeoutError:
                continue
            client.setblocking(True)
            self._count_client(+1)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _abandoned(self) -> bool:
        with self._lock:
            return self._clients == 0 and time.monotonic() - self._alone_since > LINGER_SECONDS

    def _count_client(self, change: int) -> None:
        with self._lock:
            self._clients += change
            self._alone_since = time.monotonic()

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                while True:
                    kind, blobs = frames.receive(client)
                    self._answer(client, kind, blobs)
        except (OSError, ClientGone):
            pass  # the client left; that is how every conversation ends
        finally:
            self._count_client(-1)

    def _answer(self, client: socket.socket, kind: int, blobs: list[bytes]) -> None:
        if kind == Kind.HELLO:
            self._pool.warm()
        elif kind == Kind.STATS:
            with self._lock:
                counts = json.dumps(self._counts).encode()
            frames.send(client, Kind.STATS, counts)
        elif kind == Kind.COMPILE and len(blobs) in (3, 4):
            frames.send(client, *self._compile(blobs, client))
        else:
            message = f"request of kind {kind} with {len(blobs)} blobs is unknown: plugin and service differ in version"
            frames.send(client, *frames.error(Code.INVALID_ARGUMENT, message))

    def _compile(self, blobs: list[bytes], client: socket.socket) -> tuple:
        """The reply; a program that several clients ask for at once is compiled once."""
        key = self._store.key(*blobs)
        with self._compiling.holding(key):
            found = self._store.find(key)
            if found is not None:
                self._count("store_hits")
                return found[0], *found[1]
            try:
                kind, reply = self._pool.compile(blobs, client)
            except WorkerDied as death:
                self._count("failed")
                self._count("workers_restarted")
                return frames.error(Code.INTERNAL, f"the compiler ended while it compiled this program: {death}")
            if kind != Kind.ERROR:
                self._store.keep(key, kind, reply)
        self._count("failed" if kind == Kind.ERROR else "compiled")
        return kind, *reply


def lock(path: Path) -> int | None:
    """Take the lock file beside the socket; its descriptor, or None when a live service holds it."""
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def listen(path: Path) -> socket.socket:
    """A listening socket at `path`, readable by this user alone."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    listener.listen(128)
    return listener


def clean(path: Path) -> None:
    """Remove the socket, the lock and the log, and the folder when nothing else is in it."""
    for leftover in (path, Path(f"{path}.lock"), path.parent / "service.log"):
        leftover.unlink(missing_ok=True)
    try:
        path.parent.rmdir()
    except OSError:
        pass  # other files are in it: it is not ours to remove


def main(path: Path) -> int:
    """Serve at `path` until the last client is gone; 0 also when another service already does."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.stat().st_mode & 0o077:
        print(f"{path.parent} is open to other users: give it mode 0700, or unset TT_TPU_SERVICE_DIR", file=sys.stderr)
        return 1
    if lock(path) is None:
        return 0
    # Ctrl-C at the user's terminal is for the user's program; this process follows it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    settings = bridge_settings.load()
    config = parse_config(os.environ["TT_TPU_PLUGIN_CONFIG"])
    pool = WorkerPool(settings.compile_workers)
    store = ProgramStore(settings.cache_dir / "programs", config["fingerprint"])
    try:
        Service(pool, store).run(listen(path))
    finally:
        pool.close()
        clean(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
