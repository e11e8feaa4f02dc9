"""Meshes of emulated chips, one process each."""

import pytest
from mesh_processes import MeshProcesses


def _shared(tmp_path_factory, **variables: str):
    made = {}

    def get(world: int) -> MeshProcesses:
        if world not in made:
            made[world] = MeshProcesses(tmp_path_factory.mktemp(f"mesh{world}"), world, **variables)
        return made[world]

    yield get
    for mesh in made.values():
        mesh.close()


@pytest.fixture(scope="session")
def meshes(tmp_path_factory):
    """meshes(world): a mesh that many tests share; none of them may break it."""
    yield from _shared(tmp_path_factory)


@pytest.fixture(scope="module")
def torch_meshes(tmp_path_factory):
    """torch_meshes(world): the same, whose processes see their chip through torch."""
    yield from _shared(tmp_path_factory, LIBTT_TPU_COMPAT="1")


@pytest.fixture
def new_mesh(tmp_path):
    """new_mesh(world, **variables): a mesh of this test's own."""
    made = []

    def start(world: int, per_rank=(), **variables) -> MeshProcesses:
        made.append(MeshProcesses(tmp_path, world, per_rank, **variables))
        return made[-1]

    yield start
    for mesh in made:
        mesh.close()
