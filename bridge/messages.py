"""Messages between ranks (isend and irecv), in their order and without waiting for each other.

torch_tpu's receiver leaves word of where to send to in the group's store, under a key of nothing but both ranks
and the tag: a second message between them finds the word of the first one, or overwrites it. And its sender
waits for the receiver in the caller's thread, so that two ranks which send to each other first wait
for ever. Here the receiver numbers what comes from a rank, tells the sender, and both give the number to torch_tpu as
the tag; and a thread sends what has the same tag and destination.
"""

import functools
import hashlib
import itertools
import threading
import warnings
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from types import ModuleType

from bridge import plugin_functions

# torch's registrations end with the library that made them: this one lives as long as the process.
_library = None
_counts: dict[tuple, "itertools.count[int]"] = defaultdict(itertools.count)
_works = threading.local()
_waiting: dict[tuple, deque[Callable[[], None]]] = {}
_lock = threading.Lock()


def install(_torch_tpu: ModuleType) -> None:
    """Replace c10d's operators for TPU tensors; to be called once torch_tpu has been imported."""
    global _library
    import torch

    if _library is not None or not torch.distributed.is_available():
        return
    _library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        # torch says once that an operator was registered before; here that is meant.
        warnings.simplefilter("ignore")
        _library.impl("send", _send, "PrivateUse1", allow_override=True)
        _library.impl("recv_", _receive, "PrivateUse1", allow_override=True)


def _key(group, source: int, destination: int, tag: int) -> bytes:
    """Of the next message between these ranks of the group with this tag: in the whole mesh it has no other. Both ends count alike."""
    channel = (group.group_name, source, destination, tag)
    text = repr((channel, next(_counts[channel])))
    return hashlib.sha256(text.encode()).hexdigest()[:32].encode()


def _send(tensors: list, group, destination: int, tag: int):
    """c10d's send; its work is done when the receiver has everything. RuntimeError from wait() otherwise."""
    import torch

    if _is_empty(tensors):
        return _nothing_to_do()
    group = torch.distributed.ProcessGroup.unbox(group)
    backend = group._get_backend(tensors[0].device)
    key = _key(group, group.rank(), destination, tag)
    world_rank = torch.distributed.get_global_rank(group, destination)
    sent: Future[None] = Future()

    def send() -> None:
        try:
            # Not in the group's store: who waits there keeps the other threads of this process from it.
            number = plugin_functions.await_receiver(key, world_rank)
            backend.send(tensors, destination, number).wait()
            sent.set_result(None)
        except Exception as error:
            sent.set_exception(RuntimeError(str(error)))

    _send_in_order((group.group_name, destination, tag), send)
    return _work_of(sent)


def _receive(tensors: list, group, source: int, tag: int):
    """c10d's recv_; the tensors are there when they are used, or raise RuntimeError then."""
    import torch

    if _is_empty(tensors):
        return _nothing_to_do()
    group = torch.distributed.ProcessGroup.unbox(group)
    key = _key(group, source, group.rank(), tag)
    number = plugin_functions.expect_message(key, torch.distributed.get_global_rank(group, source))
    return group._get_backend(tensors[0].device).recv(tensors, source, number).boxed()


def _work_of(future: "Future[None]"):
    """c10d's work that waits for a future, and raises what it raises."""
    work = _work_class()(future)
    # C++ does not keep a work of Python's alive. One that is done may be asked no more once its caller sends again.
    mine = vars(_works).setdefault("mine", [])
    mine[:] = [other for other in mine if not other.is_completed()]
    mine.append(work)
    return work.boxed()


@functools.cache
def _work_class() -> type:
    from torch.distributed import Work

    class Send(Work):
        def __init__(self, future: "Future[None]"):
            super().__init__()
            self._future = future

        def wait(self, timeout: timedelta = timedelta(0)) -> bool:
            self._future.result(timeout.total_seconds() or None)
            return True

        def is_completed(self) -> bool:
            return self._future.done()

    return Send


def _nothing_to_do():
    """c10d's work that is done."""
    future: Future[None] = Future()
    future.set_result(None)
    return _work_of(future)


def _is_empty(tensors: list) -> bool:
    """Whether there is nothing to send, which torch_tpu's own send would take for a buffer."""
    return not any(tensor.numel() for tensor in tensors)


def _send_in_order(channel: tuple, send: Callable[[], None]) -> None:
    """Have a thread call `send` after those before it that go to the same rank of the same group with the same tag."""
    with _lock:
        if channel in _waiting:
            _waiting[channel].append(send)
            return
        _waiting[channel] = deque([send])
    # A send that nobody receives must not keep the process from ending.
    threading.Thread(target=_send_all, args=(channel,), daemon=True, name="tt-tpu-send").start()


def _send_all(channel: tuple) -> None:
    while True:
        with _lock:
            if not _waiting[channel]:
                del _waiting[channel]
                return
            send = _waiting[channel].popleft()
        send()
