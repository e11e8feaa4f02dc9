"""Which chip a process on silicon gets, and what else only it has."""

import tempfile
from pathlib import Path

import pytest

from bridge import chips, mesh
from bridge.backend import Backend
from bridge.errors import MeshError
from bridge.settings import load


@pytest.fixture
def place(four_boards, tmp_path, monkeypatch):
    """place(rank, of, **variables): what a process adds to its environment, on a machine of four p150."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    backend = Backend("libtt", "", Path(), "", chips.mocked(four_boards)[:1], "")

    def environment(rank: int, of: int, **variables: str) -> dict[str, str]:
        given = {"RANK": str(rank), "WORLD_SIZE": str(of), "TT_METAL_MOCK_CLUSTER_DESC_PATH": str(four_boards)} | variables
        return mesh.environment(load(given), backend, given)

    return environment


def test_each_process_has_a_chip_of_its_own(place):
    """Chips go in the order of the ranks."""
    assert [place(rank, 4)["TT_VISIBLE_DEVICES"] for rank in range(4)] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("named", ["3,1", "0000:41:00.0, 0000:01:00.0", "2,3,0,1"])
def test_the_users_chips_are_shared_out(place, named):
    """TT_VISIBLE_DEVICES says which chips all processes have together, by index or PCI address."""
    wanted = [name.strip() for name in named.split(",")][:2]
    assert [place(rank, 2, TT_VISIBLE_DEVICES=named)["TT_VISIBLE_DEVICES"] for rank in range(2)] == wanted


def test_a_process_with_one_chip_keeps_it(place):
    """As a launcher gave it, or as a process that was started by a rank inherits it."""
    assert place(1, 2, TT_VISIBLE_DEVICES="3")["TT_VISIBLE_DEVICES"] == "3"


@pytest.mark.parametrize(("named", "said"), [("1,1", "a chip twice"), ("0,1", "2 chip"), ("", "no mesh of 5")])
def test_chips_that_cannot_be_shared_out_are_refused(place, named, said):
    """A chip twice, fewer chips than processes, more processes than any mesh: said before a chip is touched."""
    with pytest.raises(MeshError, match=said):
        place(0, 4 if named else 5, TT_VISIBLE_DEVICES=named)


def test_no_two_processes_share_a_folder_of_libtt(place, tmp_path):
    """Whatever TMPDIR is: two meshes of one machine have equal ranks, so the folder is named after the chip."""
    usual = [place(0, 2, TT_VISIBLE_DEVICES=named, TMPDIR=str(tmp_path))["TMPDIR"] for named in ("0,1", "2,3")]
    assert len(set(usual)) == 2
    assert all(Path(folder).parent == tmp_path and Path(folder).is_dir() for folder in usual)


def test_what_a_rank_starts_stays_in_its_folder(place, monkeypatch):
    """Its children find it in TMPDIR and make none inside it."""
    first = place(0, 2)
    monkeypatch.setattr(tempfile, "tempdir", first["TMPDIR"])
    assert place(0, 2, **first)["TMPDIR"] == first["TMPDIR"]


def test_a_rank_of_torchrun_learns_its_mesh(place):
    """torchrun's own process has no rank, and what it was given in place of a mesh is not kept by those that it starts."""
    alone = mesh.environment(load({}), None, {})
    assert place(0, 4, **alone)["TORCH_TPU_TOPOLOGY"] == "2,2,1"
    assert "TORCH_TPU_TOPOLOGY" not in place(0, 4, TORCH_TPU_TOPOLOGY="4,1,1")
