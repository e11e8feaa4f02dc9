"""torch.get_device_module("tpu") as SGLang expects it.

torch_tpu's own module is strict: set_device is for PyTorch's use alone, and there
is no stream context, empty_cache or mem_get_info. A view in front of it adds
these; everything else is torch_tpu's. Streams are host-side placeholders,
because a program is launched in the order of the calls anyway.
"""

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch

DEVICE = "tpu"


def memory_info() -> tuple[int, int]:
    """(free, total) bytes of the chip's memory, as torch_tpu reports it."""
    free, total = torch.accelerator.get_memory_info()
    return free, total


@contextlib.contextmanager
def _stream_context(stream: Any = None) -> Iterator[Any]:
    yield stream


def _view(module: Any) -> types.ModuleType:
    view = types.ModuleType("torch.tpu")
    view.Stream = torch.cpu.Stream
    view.Event = torch.cpu.Event
    view.StreamContext = view.stream = _stream_context
    view.current_stream = view.default_stream = torch.cpu.current_stream
    view.set_stream = view.set_device = lambda _=None: None
    view.synchronize = lambda device=None: torch.accelerator.synchronize()
    view.empty_cache = lambda: None
    view.mem_get_info = lambda device=None: memory_info()
    view.__getattr__ = lambda name: getattr(module, name)
    return view


def install() -> None:
    """Put the view in front of torch.get_device_module, once in a process."""
    original = torch.get_device_module
    if getattr(original, "_tpu_view", None) is not None:
        return
    view = _view(original(DEVICE))

    # wraps() keeps __wrapped__, which Dynamo reads.
    @functools.wraps(original)
    def get_device_module(device: torch.device | str | None = None) -> Any:
        asked = torch.accelerator.current_accelerator() if device is None else torch.device(device)
        return view if asked is not None and asked.type == DEVICE else original(device)

    get_device_module._tpu_view = view
    torch.get_device_module = get_device_module
