"""Several chips: each replica of the model is a mesh of its own, of --tp-size chips, one scheduler a chip.

SGLang spawns a process for each rank and tells it its rank late. Here the rank goes into the variables
that torchrun would have set, before the process touches its chip, and the collectives of the model's code
become functional ones, which are traced into the one program of a step.
"""

import json
import os
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bridge import backend, chips, mesh, ports, settings
from bridge.errors import SettingsError
from bridge.sglang_platform.device_module import DEVICE

_BACKENDS = "cpu:gloo,tpu:tpu_dist"
_IDLE_MILLISECONDS = 50


@dataclass(frozen=True)
class Layout:
    """How a server's schedulers are laid out.

    Attributes:
        replicas: of the model, --dp-size; each has chips of its own.
        size: chips of a replica, --tp-size.
        hosts: machines that a replica is spread over, --nnodes.
    """

    replicas: int = 1
    size: int = 1
    hosts: int = 1

    @classmethod
    def of(cls, arguments: Any) -> "Layout":
        """From SGLang's arguments; one that is unset is 1."""
        return cls(*(getattr(arguments, name, None) or 1 for name in ("dp_size", "tp_size", "nnodes")))

    @property
    def local_size(self) -> int:
        """Chips of a replica on one machine."""
        return self.size // self.hosts

    @property
    def local_chips(self) -> int:
        """Chips, and schedulers, on one machine."""
        return self.replicas * self.local_size


def distributed_backend() -> str:
    """Gloo for host tensors, torch_tpu's for those on the chip, which a process that is alone does not have."""
    launched = settings.load().launched
    return _BACKENDS if launched and launched.world_size > 1 else "gloo"


def check(layout: Layout, config: Path) -> None:
    """Raise where the chips that there are, or a model's heads, do not divide as `layout` has it.

    Args:
        layout: from the command line.
        config: a model's config.json; one that is not there (a model hub's name) is left to SGLang.

    Raises:
        MeshError: no mesh has so many chips, or not so many chips are there.
        SettingsError: replicas over several machines, or the model's heads cannot be divided among so many.
    """
    if layout == Layout():
        return
    _check_chips(layout)
    _check_heads(layout.size, config)


def _check_chips(layout: Layout) -> None:
    if layout.hosts > 1 and layout.replicas > 1:
        raise SettingsError(
            f"--dp-size {layout.replicas} with --nnodes {layout.hosts}: SGLang keeps all replicas on one machine; "
            "start a server on each machine instead"
        )
    if layout.size % layout.hosts:
        raise SettingsError(
            f"--tp-size {layout.size}, the chips of all machines, does not divide into --nnodes {layout.hosts} equal parts"
        )
    chosen = settings.load()
    found = backend.resolve(chosen)
    mesh.choose(chosen, found, layout.size, layout.hosts)
    if found.name == "libtt":
        mesh.share_out(chosen, layout.local_chips)


def _check_heads(size: int, config: Path) -> None:
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
    """In the process that spawns the schedulers: what all of them must know, and share."""
    layout = Layout.of(server_args)
    if layout == Layout():
        return
    if layout.hosts > 1:
        address, _, port = server_args.dist_init_addr.rpartition(":")
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=port)
    elif not os.environ.get("MASTER_PORT"):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports.free_port(layout.replicas)))
    chosen = settings.load()
    os.environ["TT_TPU_EMULATED_MEMORY"] = str(chips.emulated_memory(chosen, layout.local_chips))
    if layout.replicas > 1:  # they run the same programs, and one service compiles each of them once
        folder = Path(tempfile.gettempdir()) / f"tt-tpu-server-{secrets.token_hex(4)}"
        os.environ.setdefault("TT_TPU_SERVICE_DIR", str(folder))


def join_mesh(_server_args: Any, gpu_id: int, *_args: Any, **_kwargs: Any) -> None:
    """BEFORE configure_scheduler_process: this process's chip, and its place in the replica's mesh.

    Args:
        gpu_id: SGLang's count of this machine's schedulers, over all replicas.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    layout = Layout.of(parallel)
    if layout == Layout():
        return
    os.environ.update(place(layout, parallel.dp_rank or 0, parallel.tp_rank, int(os.environ["MASTER_PORT"])))
    chosen = settings.load()
    found = backend.resolve(chosen)
    if found.name == "libtt":
        os.environ["TT_VISIBLE_DEVICES"] = mesh.share_out(chosen, gpu_id + 1)[gpu_id]
        chosen = settings.load()
    os.environ.update(mesh.environment(chosen, found, environ={}))


def place(layout: Layout, replica: int, rank: int, port: int) -> dict[str, str]:
    """A launcher's variables for one scheduler.

    Args:
        layout: the server's.
        replica: which one this is a rank of.
        rank: within the replica.
        port: the first replica's; each has the next one, which tells their meshes apart.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(layout.size),
        "LOCAL_RANK": str(rank % layout.local_size),
        "LOCAL_WORLD_SIZE": str(layout.local_size),
        "MASTER_PORT": str(port + replica),
    }


def sleep_while_idle(controller: Any) -> None:
    """BEFORE DataParallelController.event_loop, which feeds its watchdog and asks for requests without a pause."""
    watchdog = controller.soft_watchdog
    feed = watchdog.feed

    def wait_and_feed() -> None:
        controller.recv_from_tokenizer.poll(_IDLE_MILLISECONDS)
        feed()

    watchdog.feed = wait_and_feed


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
