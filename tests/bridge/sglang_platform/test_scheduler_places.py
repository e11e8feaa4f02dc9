"""Which chip each of a server's schedulers drives, and which mesh it is in."""

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge import backend, chips, ports
from bridge.sglang_platform import tensor_parallel
from bridge.sglang_platform.tensor_parallel import Layout

PORT = 29500


@pytest.fixture
def join(four_boards, tmp_path, monkeypatch):
    """join(layout, replica, rank): the variables of a scheduler that has joined its mesh, on a machine of four p150."""
    libtt = backend.Backend("libtt", "", Path(), "", chips.mocked(four_boards)[:1], "")
    monkeypatch.setattr(backend, "resolve", lambda _settings: libtt)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def variables(layout: Layout, replica: int, rank: int) -> dict[str, str]:
        saved = dict(os.environ)
        os.environ.update(TT_METAL_MOCK_CLUSTER_DESC_PATH=str(four_boards), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORT))
        parallel = SimpleNamespace(
            dp_size=layout.replicas, tp_size=layout.size, nnodes=layout.hosts, dp_rank=replica, tp_rank=rank
        )
        context = SimpleNamespace(get_parallel=lambda: parallel)
        monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
        try:
            tensor_parallel.join_mesh(None, replica * layout.local_size + rank % layout.local_size)
            return dict(os.environ)
        finally:
            os.environ.clear()
            os.environ.update(saved)

    return variables


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(4, 1), Layout(2, 2), Layout(1, 4)], ids=str)
def test_no_chip_has_two_schedulers(join, layout):
    """Replicas take the machine's chips one after the other, and each scheduler has a folder of its own for libtt."""
    joined = [join(layout, replica, rank) for replica in range(layout.replicas) for rank in range(layout.size)]
    assert [one["TT_VISIBLE_DEVICES"] for one in joined] == [str(chip) for chip in range(layout.local_chips)]
    assert len({one["TMPDIR"] for one in joined}) == layout.local_chips


def test_each_replica_is_a_mesh_of_its_own(join):
    """Ranks count within the replica, and a port that is the replica's tells its mesh from the other."""
    joined = [join(Layout(2, 2), replica, rank) for replica in range(2) for rank in range(2)]
    places = [(one["MASTER_PORT"], one["RANK"], one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"]) for one in joined]
    assert places == [(str(PORT + replica), str(rank), "2", "2") for replica in range(2) for rank in range(2)]
    assert {one["TORCH_TPU_TOPOLOGY"] for one in joined} == {"2,1,1"}


def test_the_users_chips_are_the_replicas(join, monkeypatch):
    """TT_VISIBLE_DEVICES says which chips a server has, and in which order."""
    monkeypatch.setenv("TT_VISIBLE_DEVICES", "3,0,2,1")
    joined = [join(Layout(2, 2), replica, rank) for replica in range(2) for rank in range(2)]
    assert [one["TT_VISIBLE_DEVICES"] for one in joined] == ["3", "0", "2", "1"]


def test_a_rank_of_a_second_machine_drives_its_own_first_chip(join):
    """With --nnodes 2 chips are counted on each machine, ranks over both."""
    joined = join(Layout(1, 2, hosts=2), 0, 1)
    wanted = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TT_MESH_HOST_RANK": "1"}
    assert wanted | {"TT_VISIBLE_DEVICES": "0"} == {name: joined[name] for name in [*wanted, "TT_VISIBLE_DEVICES"]}


def test_replicas_ports_follow_each_other():
    """None of them is in use."""
    first = ports.free_port(4)
    assert not any(ports.listening_error("127.0.0.1", first + replica) for replica in range(4))
