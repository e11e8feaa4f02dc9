"""Messages between ranks (isend and irecv), in their order and without waiting for each other.

torch_tpu's receiver leaves word of where to send to in the group's store, under a key of nothing but both ranks
and the tag: a second message between them finds the word of the first one, or overwrites it. And its sender
waits for the receiver in the caller's thread, so that two ranks which send to each other first wait
for ever. Here every message has a tag of its own, and a thread sends what has the same tag and destination.
"""

import ctypes
import functools
import hashlib
import itertools
import queue
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType

from bridge.backend import PLUGIN
from bridge.errors import MeshError

# torch_tpu's tags are 32-bit integers: a message has the user's tag above and its number below.
_NUMBER_BITS = 24
_TAG_LIMIT = 1 << (31 - _NUMBER_BITS)

# torch's registrations end with the library that made them: this one lives as long as the process.
_library = None
_numbers: dict[tuple, "itertools.count[int]"] = defaultdict(itertools.count)
_senders: dict[tuple, "queue.SimpleQueue[Callable[[], None]]"] = {}


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


@dataclass(frozen=True)
class _Message:
    """One message of a group.

    Attributes:
        tag: of this message alone among those between its ranks in the group.
        key: of this message alone in the mesh, the same at both ends.
    """

    tag: int
    key: bytes


def _next(group, source: int, destination: int, tag: int) -> _Message:
    """The next message between these ranks of the group with this tag of the user's; both ends count alike.

    Raises:
        MeshError: the tag is too large, or there were too many messages.
    """
    if not 0 <= tag < _TAG_LIMIT:
        raise MeshError(f"tag {tag} of a message from rank {source} to {destination}: use one from 0 to {_TAG_LIMIT - 1}")
    channel = (group.group_name, source, destination, tag)
    number = next(_numbers[channel])
    if number >= 1 << _NUMBER_BITS:
        raise MeshError(f"more than {number} messages from rank {source} to {destination} with tag {tag}: use another tag")
    key = hashlib.sha256(repr((channel, number)).encode()).hexdigest()[:32]
    return _Message(tag << _NUMBER_BITS | number, key.encode())


def _send(tensors: list, group, destination: int, tag: int):
    """c10d's send; its work is done when the receiver has everything. RuntimeError from wait() otherwise."""
    import torch

    if _is_empty(tensors):
        return _nothing_to_do()
    group = torch.distributed.ProcessGroup.unbox(group)
    backend = group._get_backend(tensors[0].device)
    message = _next(group, group.rank(), destination, tag)
    world_rank = torch.distributed.get_global_rank(group, destination)
    sent: Future[None] = Future()

    def send() -> None:
        try:
            _await_receiver(message, world_rank)
            backend.send(tensors, destination, message.tag).wait()
            sent.set_result(None)
        except Exception as error:
            sent.set_exception(RuntimeError(str(error)))

    _sender(group.group_name, destination, tag).put(send)
    return _work_of(sent)


def _receive(tensors: list, group, source: int, tag: int):
    """c10d's recv_; the tensors are there when they are used, or raise RuntimeError then."""
    import torch

    if _is_empty(tensors):
        return _nothing_to_do()
    group = torch.distributed.ProcessGroup.unbox(group)
    message = _next(group, source, group.rank(), tag)
    _plugin().TtTpuExpectMessage(message.key, torch.distributed.get_global_rank(group, source))
    return group._get_backend(tensors[0].device).recv(tensors, source, message.tag).boxed()


def _work_of(future: "Future[None]"):
    """c10d's work that waits for a future, and raises what it raises."""
    from torch._C._distributed_c10d import PythonCallbackWork

    def wait(timeout: timedelta) -> bool:
        future.result(timeout.total_seconds() or None)
        return True

    return PythonCallbackWork(wait).boxed()


def _nothing_to_do():
    """c10d's work that is done."""
    future: Future[None] = Future()
    future.set_result(None)
    return _work_of(future)


def _is_empty(tensors: list) -> bool:
    """Whether there is nothing to send, which torch_tpu's own send would take for a buffer."""
    return not any(tensor.numel() for tensor in tensors)


def _await_receiver(message: _Message, world_rank: int) -> None:
    # Not in the group's store, as torch_tpu would: who waits there keeps the other threads of this process from it.
    problem = ctypes.create_string_buffer(2000)
    _plugin().TtTpuAwaitReceiver(message.key, world_rank, problem, len(problem))
    if problem.value:
        raise MeshError(problem.value.decode(errors="replace"))


@functools.cache
def _plugin() -> ctypes.CDLL:
    plugin = ctypes.CDLL(str(PLUGIN))
    plugin.TtTpuExpectMessage.argtypes = (ctypes.c_char_p, ctypes.c_int)
    plugin.TtTpuExpectMessage.restype = None
    plugin.TtTpuAwaitReceiver.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
    plugin.TtTpuAwaitReceiver.restype = None
    return plugin


def _sender(*channel) -> "queue.SimpleQueue[Callable[[], None]]":
    """What the thread that sends to this rank of this group, with this tag, takes its sends from."""
    sends = _senders.get(channel)
    if sends is None:
        sends = _senders[channel] = queue.SimpleQueue()

        def work() -> None:
            while True:
                sends.get()()

        # A send that nobody receives must not keep the process from ending.
        threading.Thread(target=work, daemon=True, name="tt-tpu-send").start()
    return sends
