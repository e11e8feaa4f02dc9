"""Weights on their way to the chip.

SGLang fills a model's parameters slice by slice (q, k and v into one matrix),
which would be one program a shape on the chip. So the model is built and filled
on the host, and each finished tensor is moved once.
"""

from collections.abc import Callable
from typing import Any

import torch

from bridge import host_memory
from bridge.sglang_platform.device_module import DEVICE


def load_on_host(load: Callable, *, device: str, **arguments: Any) -> Any:
    """AROUND load_model_with_memory_saver: build the model on the host."""
    return load(device="cpu", **arguments)


def _on_chip(tensor: torch.Tensor) -> torch.Tensor:
    moved = tensor.detach().to(DEVICE)
    if isinstance(tensor, torch.nn.Parameter):
        moved = torch.Tensor._make_subclass(type(tensor), moved, False)
    # SGLang hangs what it knows of a weight (its loader, its sharded axis) on the tensor.
    moved.__dict__.update(tensor.__dict__)
    return moved


def move_to_chip(model: torch.nn.Module) -> None:
    """Move parameters and buffers, one at a time, so that at most one is held twice.

    A tensor that several modules share (tied embeddings) stays shared.
    """
    places: dict[torch.Tensor, list[tuple[dict, str]]] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    places.setdefault(tensor, []).append((table, name))
    while places:
        tensor, found = places.popitem()
        moved = _on_chip(tensor)
        for table, name in found:
            table[name] = moved
    tensor = None  # the last one on the host
    host_memory.give_back()
