"""Meshes of emulated chips, one process each."""

import pytest
from mesh_processes import MeshProcesses


def _shared(tmp_path_factory, **variables: str):
    made = {}

    def get(world: int, hosts: int = 1) -> MeshProcesses:
        if (world, hosts) not in made:
            made[world, hosts] = MeshProcesses(tmp_path_factory.mktemp(f"mesh{world}"), world, hosts=hosts, **variables)
        return made[world, hosts]

    yield get
    for mesh in made.values():
        mesh.close()


@pytest.fixture(scope="session")
def meshes(tmp_path_factory):
    """meshes(world, hosts): a mesh that many tests share; none of them may break it."""
    yield from _shared(tmp_path_factory)


@pytest.fixture(scope="module")
def torch_meshes(tmp_path_factory):
    """torch_meshes(world, hosts): the same, whose processes see their chip through torch."""
    yield from _shared(tmp_path_factory, LIBTT_TPU_COMPAT="1")


@pytest.fixture
def new_mesh(tmp_path):
    """new_mesh(world, per_rank, **options of MeshProcesses): a mesh of this test's own."""
    made = []

    def start(world: int, per_rank=(), **options) -> MeshProcesses:
        made.append(MeshProcesses(tmp_path, world, per_rank, **options))
        return made[-1]

    yield start
    for mesh in made:
        mesh.close()
