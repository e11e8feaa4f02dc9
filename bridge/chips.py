"""The chips of this machine: Tenstorrent's under /dev/tenstorrent, or emulated ones.

Discovery only looks at device files and sysfs, so that it can run at
interpreter start, and beside a process that uses the chips.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import BackendError
from bridge.settings import Settings

DEVICES = Path("/dev/tenstorrent")
SYSFS = Path("/sys/class/tenstorrent")

# Bytes of DRAM that one chip of a board has; source: Tenstorrent's data sheets.
BOARD_MEMORY = {
    "p100": 28 << 30,
    "p150": 32 << 30,
    "p300": 32 << 30,
    "n150": 12 << 30,
    "n300": 12 << 30,
}
EMULATED_BOARD = "p150"


@dataclass(frozen=True)
class Chip:
    """One chip that a process can drive.

    Attributes:
        index: its number under /dev/tenstorrent, or among the emulated ones.
        board: "p150", "n300", …; "unknown" where the driver does not say.
        memory: bytes of device memory.
        device: its device file, None for an emulated chip.
    """

    index: int
    board: str
    memory: int
    device: Path | None = None

    @property
    def emulated(self) -> bool:
        """Whether the host computes what the chip would."""
        return self.device is None


def _board(index: int, sysfs: Path) -> str:
    """The board's name without its variant letter, as in p150a; "unknown" where sysfs has none."""
    try:
        name = (sysfs / f"tenstorrent!{index}" / "tt_card_type").read_text().strip().lower()
    except OSError:
        return "unknown"
    return next((board for board in BOARD_MEMORY if name.startswith(board)), name or "unknown")


def address(index: int, sysfs: Path = SYSFS) -> str:
    """A chip's PCI address, 0000:01:00.0, or its number where the driver does not say."""
    try:
        return os.readlink(sysfs / f"tenstorrent!{index}" / "device").rpartition("/")[2]
    except OSError:
        return str(index)


def silicon(devices: Path = DEVICES, sysfs: Path = SYSFS) -> tuple[Chip, ...]:
    """The chips that Tenstorrent's driver shows, in the order of their numbers."""
    if not devices.is_dir():
        return ()
    indices = sorted(int(entry.name) for entry in devices.iterdir() if entry.name.isdigit())
    chips = []
    for index in indices:
        board = _board(index, sysfs)
        memory = BOARD_MEMORY.get(board, min(BOARD_MEMORY.values()))
        chips.append(Chip(index, board, memory, devices / str(index)))
    return tuple(chips)


def mocked(descriptor: Path) -> tuple[Chip, ...]:
    """The chips that a cluster descriptor of tt-metal's describes, one a line below `arch:`.

    Raises:
        BackendError: the file cannot be read or describes no chip.
    """
    try:
        text = descriptor.read_text()
    except OSError as error:
        raise BackendError(f"TT_METAL_MOCK_CLUSTER_DESC_PATH={descriptor} cannot be read: {error.strerror}") from None
    section = re.search(r"^arch:\n((?:[ \t]+\d+:.*\n)+)", text, re.MULTILINE)
    board = re.search(r"board_type:\s*(\w+)", text)
    if section is None or board is None:
        raise BackendError(f"{descriptor} describes no chips: it has no `arch:` or no `board_type:`")
    name = next((known for known in BOARD_MEMORY if board[1].lower().startswith(known)), board[1])
    memory = BOARD_MEMORY.get(name, min(BOARD_MEMORY.values()))
    return tuple(Chip(index, name, memory, descriptor) for index in range(len(section[1].splitlines())))


def present(settings: Settings) -> tuple[Chip, ...]:
    """All chips that libtt could drive on this machine, the described ones where a cluster is described."""
    return silicon() if settings.mock_cluster is None else mocked(settings.mock_cluster)


def host_memory() -> int:
    """Bytes of memory that this process may use: the host's, or its control group's where that is less."""
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = min(limit, int(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    return limit


def emulated_memory(settings: Settings, chips: int) -> int:
    """Bytes of each of `chips` emulated chips; together they never promise more than the host has.

    A tenth of the host's memory is left to the programs themselves.
    """
    return min(settings.emulated_memory, host_memory() * 9 // 10 // chips)


def emulated(settings: Settings) -> tuple[Chip, ...]:
    """Emulated chips of this process, which shares the host's memory with the others of its mesh."""
    processes = settings.launched.local_world_size if settings.launched else 1
    memory = emulated_memory(settings, settings.emulated_chips * processes)
    return tuple(Chip(index, EMULATED_BOARD, memory) for index in range(settings.emulated_chips))
