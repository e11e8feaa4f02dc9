"""The meshes that the package describes, and the choice among them."""

import pytest

import mesh_descriptors
from mesh_descriptors import MeshError
from mesh_descriptors.catalogue import catalogue, describe, load

NAMES = {
    "p100": 1, "p150": 1, "p150_x2": 2, "p150_x4": 4, "p150_x8": 8, "p300": 2, "p300_x2": 4, "n150": 1, "n300": 2,
    "n300_x2": 4, "n300_x4": 8, "galaxy_wormhole": 32, "galaxy_blackhole": 32, "p150_x2_hosts2": 2,
    "p150_x4_hosts2": 4, "p150_x8_hosts2": 8,
}  # fmt: skip


def test_every_set_is_there():
    """Each board set has its number of chips."""
    assert {mesh.name: mesh.chips for mesh in catalogue()} == NAMES


@pytest.mark.parametrize("mesh", catalogue(), ids=lambda mesh: mesh.name)
def test_a_description_reads_back(mesh, tmp_path):
    """The text that libtt is given describes the same mesh."""
    path = tmp_path / f"{mesh.name}.textproto"
    path.write_text(describe(mesh))
    again = load(path)
    assert (again.dims, again.hosts, again.arch, again.channels) == (mesh.dims, mesh.hosts, mesh.arch, mesh.channels)


@pytest.mark.parametrize(
    ("board", "chips", "hosts", "dims"),
    [("p150", 1, 1, 1), ("p150", 4, 1, 4), ("p150", 3, 1, 3), ("p150", 8, 1, 8), ("P300", 4, 1, 4), ("t3k", 8, 1, 8),
     ("t3k", 4, 1, 4), ("n300", 2, 1, 2), ("galaxy_wormhole", 16, 1, 16), ("p150", 2, 2, 2), ("p150", 4, 2, 4)],
)  # fmt: skip
def test_a_number_of_chips_finds_its_mesh(board, chips, hosts, dims):
    """A whole set, or a rectangle of the smallest one that has enough chips."""
    mesh = mesh_descriptors.select(board, chips, hosts)
    assert (mesh.chips, mesh.host_count) == (dims, hosts)


@pytest.mark.parametrize(
    ("board", "chips", "hosts", "named"),
    [("p150", 7, 1, ["7 chips", "1, 2, 3, 4, 6, 8"]), ("p150", 0, 1, ["0 chips"]), ("p150", 6, 2, ["2, 4, 8 in 2 host"]),
     ("q9", 1, 1, ["q9", "p150", "n300"]), ("n150", 2, 1, ["2 chips", "1 in 1 host"])],
)  # fmt: skip
def test_what_fits_is_named(board, chips, hosts, named):
    """Where nothing fits the message says what would."""
    with pytest.raises(MeshError) as error:
        mesh_descriptors.select(board, chips, hosts)
    assert all(part in str(error.value) for part in named)


@pytest.mark.parametrize(
    "text",
    ["", "nonsense {", 'mesh_descriptors { name: "M0" }', 'mesh_descriptors { name: "M0" colour: 3 }'],
    ids=["empty", "no text format", "no topology", "an unknown field"],
)
def test_a_broken_description_is_refused(text, tmp_path):
    """The message names the file."""
    path = tmp_path / "mine.textproto"
    path.write_text(text)
    with pytest.raises(MeshError, match="mine.textproto"):
        load(path)
