"""A process's place in a mesh of chips, as torch_tpu and libtt want to be told.

Launchers set RANK and WORLD_SIZE; here is found what else a process needs, from the board and the
number of processes. What the user has set is kept, and checked.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import mesh_descriptors
from bridge import chips
from bridge.backend import Backend
from bridge.errors import MeshError
from bridge.settings import Launched, Settings

_DEFAULT_MASTER = ("127.0.0.1", 29500)
# torch_tpu's own way to share programs between ranks leaves files and locks in shared memory, which every user can
# write, for ever. Ours compile a program once for all of them: they share the compile service.
_NO_SHARED_CACHE = {"TORCH_TPU_TIER2_COMPILATION_CACHE": "disabled"}
# For a process that learns its rank later (torch.multiprocessing.spawn) or has none (torchrun's own): torch_tpu wants
# them to be set, and nothing else reads them. In a rank, which inherits them, they count as unset.
_PLACEHOLDERS = {"TORCH_TPU_SLICEBUILDER_ADDRESSES": "localhost:1", "TORCH_TPU_TOPOLOGY": "1,1,1"}
# What processes of one host must not have in common.
_OF_ONE_PROCESS = ("TT_VISIBLE_DEVICES", "TMPDIR")


def environment(settings: Settings, backend: Backend, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that are missing in `environ` for this process to take part in its mesh.

    Two of them replace what `environ` has: of several visible chips the process gets one, and libtt a folder of its own.

    Raises:
        MeshError: no mesh has so many chips, or a variable that the user set does not fit.
    """
    launched = settings.launched
    if launched is None:
        wanted = _PLACEHOLDERS
    else:
        mesh = choose(settings, backend, launched.world_size, launched.world_size // launched.local_world_size)
        wanted = _for_torch_tpu(settings, launched, mesh)
        if backend.name == "libtt":
            wanted |= _for_libtt(settings, launched, mesh, backend)
    wanted = wanted | _NO_SHARED_CACHE
    kept = {name for name, value in environ.items() if value and value != _PLACEHOLDERS.get(name)}
    return {name: value for name, value in wanted.items() if name in _OF_ONE_PROCESS or name not in kept}


def choose(settings: Settings, backend: Backend, chips: int, hosts: int = 1) -> mesh_descriptors.Mesh:
    """The mesh of `chips` chips on `hosts` hosts: the user's own, or one of this board's.

    Raises:
        MeshError: there is none, or the user's own has another number of chips.
    """
    try:
        if settings.mesh_graph is None:
            return mesh_descriptors.select(backend.chips[0].board, chips, hosts)
        mesh = mesh_descriptors.load(settings.mesh_graph)
    except mesh_descriptors.MeshError as error:
        raise MeshError(f"a mesh for WORLD_SIZE={chips}: {error}") from None
    if mesh.chips != chips:
        raise MeshError(
            f"TT_MESH_GRAPH_DESC_PATH={settings.mesh_graph} describes {mesh.chips} chips, there are {chips} processes: "
            "start one for each chip, or unset it"
        )
    return mesh


def _for_torch_tpu(settings: Settings, launched: Launched, mesh: mesh_descriptors.Mesh) -> dict[str, str]:
    address, port = launched.master or _DEFAULT_MASTER
    # A TPU's processes meet at these addresses, one a rank. Ours meet at the first, and only those of several hosts.
    meeting = (f"{address}:{settings.base_port + rank}" for rank in range(launched.world_size))
    return {
        "LOCAL_RANK": str(launched.local_rank),
        "LOCAL_WORLD_SIZE": str(launched.local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": ",".join(meeting),
        "TORCH_TPU_TOPOLOGY": mesh.topology,
    }


def _for_libtt(settings: Settings, launched: Launched, mesh: mesh_descriptors.Mesh, backend: Backend) -> dict[str, str]:
    chip = _own_chip(settings, launched)
    folder = Path(tempfile.gettempdir())
    name = f"tt-tpu-libtt-{os.getuid()}-{chip}"
    if folder.name != name:  # else a process that belongs to this one
        folder /= name
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = folder / f"{mesh.name}.textproto"
    if settings.mesh_graph is None:
        descriptor.write_text(mesh_descriptors.describe(mesh))
    return {
        "TT_VISIBLE_DEVICES": chip,
        "TT_MESH_GRAPH_DESC_PATH": str(descriptor),
        "TT_MESH_ID": "0",
        "TT_MESH_HOST_RANK": str(launched.rank // launched.local_world_size),
        # Two libtt processes that share one race on a file in it.
        "TMPDIR": str(folder),
    }


def _own_chip(settings: Settings, launched: Launched) -> str:
    named = settings.visible_devices
    if named and "," not in named:  # the launcher's choice, or ours in a process above this one
        return named
    return share_out(settings, launched.local_world_size)[launched.local_rank]


def share_out(settings: Settings, processes: int) -> tuple[str, ...]:
    """A chip for each of this host's processes, named as TT_VISIBLE_DEVICES names it: the user's first ones, or the host's.

    Raises:
        MeshError: there are fewer, or the user names one twice.
    """
    named = settings.visible_devices
    if named is None:
        names, source = [str(chip.index) for chip in chips.present(settings)], "this machine has"
    else:
        names, source = [name.strip() for name in named.split(",")], f"TT_VISIBLE_DEVICES={named} names"
    if len(set(names)) < len(names):
        raise MeshError(f"{source} a chip twice: name each once, a process drives one of its own")
    if len(names) < processes:
        raise MeshError(f"{source} {len(names)} chip(s) for {processes} processes: start fewer, or let them see more chips")
    return tuple(names[:processes])
