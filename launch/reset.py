"""Remove what a power cut or a kill has left: locks, shared memory, sockets and folders whose processes are gone.

What a living process has open or mapped, or names among its arguments or variables, is left alone and said; processes
of other containers cannot be seen, so run it where they are. Where chips are, it says which of them need `tt-smi -r`.
"""

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge import chips, settings

SHARED_MEMORY = Path("/dev/shm")
TEMPORARY = (Path("/tmp"), Path(tempfile.gettempdir()))
CHIP_LOCKS = Path("/tmp")  # as bridge/plugin/chip_lock.cc has it
# What SGLang, libtt and Python's multiprocessing keep in shared memory.
_SEGMENT = re.compile(r"sglang_loads_\w+\.shm|sgl_shm_\w+|sem\.mp-\w+|TT_UMD_LOCK\..+|tt_device_\d+_memory")
# Folders of this project, and the sockets between SGLang's processes.
_TEMPORARY = re.compile(r"tt-tpu-(?!chip-).+|tmp\w{8}")
_CHIP_LOCK = "tt-tpu-chip-*.lock"
# Who has just made something may not have it open yet.
_NEW_SECONDS = 10.0


@dataclass(frozen=True)
class Process:
    """A living process, and what it uses.

    Attributes:
        name: its number and command.
        inodes: of the files in shared memory that it has mapped or open. Their names do not tell: glibc maps a
            semaphore under another one than it keeps.
        words: its arguments, its variables, and the paths of what it has open.
    """

    name: str
    inodes: frozenset[int]
    words: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of reset."""
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")


def run(args: argparse.Namespace, _unknown: Sequence[str]) -> int:
    """Remove, and say what was removed and what was left and why; 1 if something could not be removed."""
    failed = False
    for path, user in leftovers(SHARED_MEMORY, TEMPORARY, tuple(processes())):
        if user:
            print(f"left {path}: {user}")
            continue
        try:
            if not args.dry_run:
                _remove(path)
            print(f"{'would remove' if args.dry_run else 'removed'} {path}")
        except OSError as error:
            failed = True
            print(f"could not remove {path}: {error.strerror}", file=sys.stderr)
    for line in advice(settings.load(), killed_on_chips(CHIP_LOCKS, forget=not args.dry_run)):
        print(line)
    return 1 if failed else 0


def leftovers(shared_memory: Path, folders: Iterable[Path], living: Sequence[Process]) -> Iterator[tuple[Path, str]]:
    """What may have been left in shared memory and in folders for temporary files, each with who uses it, "" if nobody."""
    for path in sorted(shared_memory.iterdir()) if shared_memory.is_dir() else ():
        if _SEGMENT.fullmatch(path.name):
            yield from _judge(path, lambda found, process: found.st_ino in process.inodes, living)
    listening = _listening()
    for path in (path for folder in sorted(set(folders)) for path in sorted(folder.iterdir())):
        if not _TEMPORARY.fullmatch(path.name) or not (path.is_socket() or path.name.startswith("tt-tpu-")):
            continue
        if any(name == str(path) or name.startswith(f"{path}/") for name in listening):
            yield path, "a living process listens there"
        else:
            yield from _judge(path, lambda _, process, path=path: str(path) in process.words, living)


def _judge(path: Path, uses: Callable[[os.stat_result, Process], bool], living: Sequence[Process]) -> Iterator[tuple[Path, str]]:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return  # gone meanwhile
    if os.geteuid() not in (0, found.st_uid):
        return  # not ours to judge: its owner's processes do not show what they have open
    user = next((process for process in living if uses(found, process)), None)
    if user:
        yield path, f"{user.name} uses it"
    else:
        yield path, "it was made just now" if time.time() - found.st_ctime < _NEW_SECONDS else ""


def _listening() -> set[str]:
    """The paths of all sockets that are bound."""
    return {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "/" in line}


def processes() -> Iterator[Process]:
    """All other living processes, as far as this user may look into them."""
    for folder in Path("/proc").glob("[0-9]*"):
        if folder.name == str(os.getpid()):
            continue
        with contextlib.suppress(OSError):
            yield _process(folder)


def _process(folder: Path) -> Process:
    mapped = [line.split() for line in (folder / "maps").read_text(errors="replace").splitlines() if f" {SHARED_MEMORY}/" in line]
    inodes, words = {int(line[4]) for line in mapped}, [(folder / name).read_text(errors="replace") for name in ("cmdline", "environ")]
    command = words[0].replace("\0", " ").strip()
    for descriptor in [*(folder / "fd").iterdir(), folder / "cwd"]:
        with contextlib.suppress(OSError):  # closed meanwhile
            name = os.readlink(descriptor)
            words.append(name)
            if name.startswith(f"{SHARED_MEMORY}/"):
                inodes.add(descriptor.stat().st_ino)
    return Process(f"process {folder.name} ({command[:60]})", frozenset(inodes), "\0".join(words))


def _remove(path: Path) -> None:
    if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def killed_on_chips(folder: Path, forget: bool) -> tuple[str, ...]:
    """The chips whose last process did not come to its end: its number still stands in the lock that it held.

    Args:
        folder: where the locks are.
        forget: remove those that nobody holds.

    Returns:
        The chips' PCI addresses, or their numbers.
    """
    killed = []
    for path in sorted(folder.glob(_CHIP_LOCK)):
        with contextlib.suppress(OSError), path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.read().strip():
                killed.append(path.name.removeprefix("tt-tpu-chip-").removesuffix(".lock"))
            if forget:
                path.unlink()
    return tuple(killed)


def advice(chosen: settings.Settings, killed: Sequence[str]) -> Iterator[str]:
    """When `tt-smi -r` is needed, and for which chips; nothing where there is no silicon."""
    silicon = chips.silicon()
    if chosen.backend == "emulated" or not (chosen.backend == "libtt" or silicon):
        return
    indices = {chips.address(chip.index): str(chip.index) for chip in silicon}
    if killed:
        numbers = ",".join(indices.get(name, name) for name in killed)
        yield f"chips {numbers}: a process was killed while it used them, and may have left them busy: run `tt-smi -r {numbers}`"
    else:
        yield "no process was killed on a chip; one that hangs all the same needs `tt-smi -r N`, with its number under /dev/tenstorrent"
