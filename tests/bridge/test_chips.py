"""Chips are found where the driver shows them, and emulated ones fit the host."""

import pytest

from bridge import chips
from bridge.errors import BackendError
from bridge.settings import Settings


def _driver(tmp_path, boards):
    devices, sysfs = tmp_path / "dev", tmp_path / "sys"
    devices.mkdir()
    for index, board in boards.items():
        (devices / str(index)).touch()
        (sysfs / f"tenstorrent!{index}").mkdir(parents=True)
        (sysfs / f"tenstorrent!{index}" / "tt_card_type").write_text(board + "\n")
    return devices, sysfs


def test_no_driver_no_chips(tmp_path):
    """Without the driver's folder there is no chip, and no error."""
    assert chips.silicon(tmp_path / "none", tmp_path) == ()


def test_boards_are_read_from_the_driver(tmp_path):
    """Chips come in the order of their numbers, each with its board's memory."""
    found = chips.silicon(*_driver(tmp_path, {10: "p150b", 2: "n300", 0: "p100a"}))
    assert [(c.index, c.board, c.memory >> 30) for c in found] == [(0, "p100", 28), (2, "n300", 12), (10, "p150", 32)]
    assert not any(c.emulated for c in found)


def test_an_unknown_board_promises_little(tmp_path):
    """A board that the table does not know counts with the smallest memory there is."""
    (found,) = chips.silicon(*_driver(tmp_path, {0: "x900"}))
    assert found.memory == min(chips.BOARD_MEMORY.values())


@pytest.mark.parametrize("count", (1, 4))
def test_emulated_memory_never_exceeds_the_host(count):
    """However much is asked, all emulated chips together leave the host a tenth of its memory."""
    found = chips.emulated(Settings(emulated_chips=count, emulated_memory=1 << 50))
    assert len(found) == count and all(c.emulated for c in found)
    assert sum(c.memory for c in found) <= chips.host_memory() * 9 // 10


def test_emulated_memory_can_be_less():
    """TT_TPU_EMULATED_MEMORY is taken as it is where the host has it."""
    (found,) = chips.emulated(Settings(emulated_memory=64 << 20))
    assert found.memory == 64 << 20


@pytest.mark.parametrize("count", (1, 4))
def test_a_mock_cluster_has_its_chips(tmp_path, count):
    """Chips and board come from tt-metal's cluster descriptor."""
    arch = "".join(f"  {index}: blackhole\n" for index in range(count))
    descriptor = tmp_path / "cluster.yaml"
    descriptor.write_text(f"arch:\n{arch}chips:\n  {{}}\nboards:\n  -\n    - board_type: p150\n")
    found = chips.mocked(descriptor)
    assert [(c.index, c.board, c.memory) for c in found] == [(i, "p150", 32 << 30) for i in range(count)]
    assert not any(c.emulated for c in found)


@pytest.mark.parametrize("content", (None, "", "chips: {}\n"))
def test_a_mock_cluster_that_describes_nothing_is_an_error(tmp_path, content):
    """A missing or empty descriptor is said to be one."""
    descriptor = tmp_path / "cluster.yaml"
    if content is not None:
        descriptor.write_text(content)
    with pytest.raises(BackendError, match="cluster.yaml"):
        chips.mocked(descriptor)
