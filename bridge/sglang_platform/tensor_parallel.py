"""Tensor parallel: SGLang's schedulers, one for each chip, join their chips into a mesh.

SGLang spawns a process for each rank and tells it its rank late. Here the rank goes into the variables
that torchrun would have set, before the process touches its chip, and the collectives of the model's code
become functional ones, which are traced into the one program of a step.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bridge import backend, mesh, ports, settings
from bridge.errors import SettingsError
from bridge.sglang_platform.device_module import DEVICE

_BACKENDS = "cpu:gloo,tpu:tpu_dist"


def distributed_backend() -> str:
    """Gloo for host tensors, torch_tpu's for those on the chip, which a process that is alone does not have."""
    return _BACKENDS if settings.load().launched else "gloo"


def check(size: int, config: Path) -> None:
    """Raise where a mesh or a model's heads do not divide into `size`.

    Args:
        size: of the tensor parallel group, --tp-size.
        config: a model's config.json; one that is not there (a model hub's name) is left to SGLang.

    Raises:
        MeshError: no mesh has so many chips.
        SettingsError: the model's heads cannot be divided among so many.
    """
    if size == 1:
        return
    chosen = settings.load()
    mesh.choose(chosen, backend.resolve(chosen), size)
    if not config.is_file():
        return
    values = json.loads(config.read_text())
    values = values.get("text_config") or values
    heads = values.get("num_attention_heads")
    kv_heads = values.get("num_key_value_heads") or heads
    if heads and not _divides(size, heads, kv_heads):
        fitting = [str(n) for n in range(1, heads + 1) if _divides(n, heads, kv_heads)]
        raise SettingsError(
            f"--tp-size {size} does not divide this model's {heads} attention heads and {kv_heads} key/value heads: "
            f"use {', '.join(fitting)}"
        )


def _divides(size: int, heads: int, kv_heads: int) -> bool:
    """Each rank has as many heads; key/value heads are shared out, or copied where there are fewer of them than ranks."""
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def prepare(server_args: Any) -> None:
    """In the process that spawns the schedulers: a port that all of them know."""
    if server_args.tp_size > 1 and not os.environ.get("MASTER_PORT"):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports.free_port()))


def join_mesh(*_args: Any, **_kwargs: Any) -> None:
    """BEFORE configure_scheduler_process: this process's place in the mesh."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.tp_size == 1:
        return
    rank, size = str(parallel.tp_rank), str(parallel.tp_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    chosen = settings.load()
    os.environ.update(mesh.environment(chosen, backend.resolve(chosen), environ={}))


def _traced(group: Any, x: torch.Tensor) -> bool:
    return group.world_size > 1 and x.device.type == DEVICE


def all_reduce(original: Callable, group: Any, x: torch.Tensor) -> torch.Tensor:
    """AROUND GroupCoordinator.all_reduce."""
    if not _traced(group, x):
        return original(group, x)
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(x, "sum", group.device_group.group_name))


def all_gather(
    original: Callable, group: Any, x: torch.Tensor, dim: int = -1, output_tensor_list: list | None = None
) -> torch.Tensor:
    """AROUND GroupCoordinator.all_gather: the ranks' tensors one after the other along `dim`."""
    if not _traced(group, x) or output_tensor_list is not None:
        return original(group, x, dim, output_tensor_list)
    functional = torch.ops._c10d_functional
    gathered = functional.all_gather_into_tensor(x.contiguous(), group.world_size, group.device_group.group_name)
    return torch.cat(functional.wait_tensor(gathered).chunk(group.world_size), dim=dim)
