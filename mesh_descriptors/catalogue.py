"""Which meshes there are, and which of them fits a board and a number of chips.

A file is named after what it describes: board, number of boards, number of hosts. A part of a board set is a
mesh too where it is a rectangle, as the chips in it are joined to each other without the rest.
"""

import dataclasses
import functools
import re
from dataclasses import dataclass
from pathlib import Path

from mesh_descriptors.errors import MeshError

FOLDER = Path(__file__).parent
# Names by which people know a set.
ALIASES = {"t3k": "n300_x4", "quietbox2": "p300_x2", "galaxy": "galaxy_wormhole"}


@dataclass(frozen=True)
class Mesh:
    """Chips in a rectangle, and how they are joined.

    Attributes:
        name: of the board set, as "p150_x4"; of a part of one, as "p150_x4_1x2".
        board: "p150", "n300", …
        arch: "BLACKHOLE" or "WORMHOLE_B0".
        dims: rows and columns of chips.
        hosts: rows and columns of hosts, each of which has an equal part of the chips.
        channels: Ethernet channels between two neighbours.
        policy: "STRICT" where all of them must be up, else "RELAXED".
    """

    name: str
    board: str
    arch: str
    dims: tuple[int, int]
    hosts: tuple[int, int]
    channels: int
    policy: str

    @property
    def chips(self) -> int:
        """How many chips the mesh has."""
        return self.dims[0] * self.dims[1]

    @property
    def host_count(self) -> int:
        """How many hosts it spans."""
        return self.hosts[0] * self.hosts[1]

    @property
    def topology(self) -> str:
        """Its extent as torch_tpu writes it, columns first: "2,1,1" is a row of two."""
        return f"{self.dims[1]},{self.dims[0]},1"


def load(path: Path) -> Mesh:
    """Read and check a descriptor of one mesh.

    Raises:
        MeshError: the file cannot be read, is no descriptor, or describes what cannot be.
    """
    from mesh_descriptors.schema import parse

    try:
        text = path.read_text()
    except OSError as error:
        raise MeshError(f"mesh descriptor {path} cannot be read: {error.strerror}") from None
    graph = parse(text, str(path))
    named = {mesh.name: mesh for mesh in graph.mesh_descriptors}
    top = graph.top_level_instance.mesh.mesh_descriptor
    if top not in named:
        raise MeshError(f"{path}: top_level_instance names mesh {top!r}, the file describes {', '.join(named) or 'none'}")
    mesh = named[top]
    dims, hosts = (tuple(topology.dims) for topology in (mesh.device_topology, mesh.host_topology))
    arch = type(mesh).DESCRIPTOR.fields_by_name["arch"].enum_type.values_by_number[mesh.arch].name
    policies = type(mesh.channels).DESCRIPTOR.fields_by_name["policy"].enum_type.values_by_number
    policy = policies[mesh.channels.policy].name
    found = Mesh(path.stem, _board(path.stem), arch, dims, hosts, mesh.channels.count, policy)
    _check(found, path)
    return found


def _board(name: str) -> str:
    return re.sub(r"(_x\d+)?(_hosts\d+)?(_\d+x\d+)?$", "", name)


def _check(mesh: Mesh, path: Path) -> None:
    wrong = ""
    if mesh.arch == "INVALID_ARCH":
        wrong = "it has no arch"
    elif len(mesh.dims) != 2 or len(mesh.hosts) != 2 or min(*mesh.dims, *mesh.hosts) < 1:
        wrong = f"chips {list(mesh.dims)} and hosts {list(mesh.hosts)} must be two positive numbers each"
    elif any(chips % hosts for chips, hosts in zip(mesh.dims, mesh.hosts, strict=True)):
        wrong = f"{list(mesh.dims)} chips cannot be divided among {list(mesh.hosts)} hosts"
    elif mesh.channels < 1:
        wrong = "neighbours have no channels"
    if wrong:
        raise MeshError(f"mesh descriptor {path}: {wrong}")


@functools.cache
def catalogue() -> tuple[Mesh, ...]:
    """Every mesh that this package describes, small ones first."""
    return tuple(sorted((load(path) for path in FOLDER.glob("*.textproto")), key=lambda mesh: (mesh.chips, mesh.name)))


def select(board: str, chips: int, hosts: int = 1) -> Mesh:
    """The mesh of `chips` chips on boards of this kind, or a part of the smallest set that has enough of them.

    Args:
        board: "p150", or a set's own name such as "p150_x4", "t3k".
        chips: how many chips there are to be, on all hosts together.
        hosts: how many hosts they are in.

    Raises:
        MeshError: no set of these boards has such a rectangle; the message names what fits.
    """
    board = ALIASES.get(board.lower(), board.lower())
    known = [mesh for mesh in catalogue() if board in (mesh.board, mesh.name)]
    if not known:
        boards = sorted({mesh.board for mesh in catalogue()})
        raise MeshError(f"no mesh of board {board!r} is known: use one of {', '.join(boards)}")
    fitting = [mesh for mesh in known if mesh.host_count == hosts]
    for mesh in fitting:
        if mesh.chips == chips:
            return mesh
    for mesh in fitting:
        part = _rectangle(chips, mesh.dims) if hosts == 1 else None
        if part is not None:
            return dataclasses.replace(mesh, name=f"{mesh.name}_{part[0]}x{part[1]}", dims=part)
    raise MeshError(f"no mesh of {chips} chips of board {board} in {hosts} host(s): {_offer(known)}")


def _rectangle(chips: int, within: tuple[int, int]) -> tuple[int, int] | None:
    """Rows and columns of a part of `within`, the most like a square; None where none has so many chips."""
    parts = [(rows, chips // rows) for rows in range(1, within[0] + 1) if chips > 0 and chips % rows == 0]
    parts = [part for part in parts if part[1] <= within[1]]
    return min(parts, key=lambda part: abs(part[0] - part[1]), default=None)


def _offer(known: list[Mesh]) -> str:
    texts = []
    for hosts in sorted({mesh.host_count for mesh in known}):
        sets = [mesh for mesh in known if mesh.host_count == hosts]
        sizes = {mesh.chips for mesh in sets}
        if hosts == 1:
            sizes |= {n for mesh in sets for n in range(1, mesh.chips) if _rectangle(n, mesh.dims)}
        texts.append(f"{', '.join(map(str, sorted(sizes)))} in {hosts} host(s)")
    return f"what fits is {'; '.join(texts)}"


def describe(mesh: Mesh) -> str:
    """The text of a mesh graph descriptor, for TT_MESH_GRAPH_DESC_PATH."""
    return (
        f"# {mesh.name}\n"
        "mesh_descriptors {\n"
        '  name: "M0"\n'
        f"  arch: {mesh.arch}\n"
        f"  device_topology {{ dims: [ {mesh.dims[0]}, {mesh.dims[1]} ] }}\n"
        f"  host_topology {{ dims: [ {mesh.hosts[0]}, {mesh.hosts[1]} ] }}\n"
        f"  channels {{ count: {mesh.channels} policy: {mesh.policy} }}\n"
        "}\n"
        'top_level_instance { mesh { mesh_descriptor: "M0" mesh_id: 0 } }\n'
    )
