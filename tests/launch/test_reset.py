"""tt-tpu reset: what is left of dead processes goes, what belongs to living ones stays, and both are said."""

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bridge import chips
from bridge.settings import Settings
from launch import cli, reset


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Folders in place of shared memory, of that for temporary files and of that for chips' locks; all is old enough."""
    folders = [tmp_path / name for name in ("shm", "tmp", "locks")]
    for folder in folders:
        folder.mkdir()
    monkeypatch.setattr(reset, "SHARED_MEMORY", folders[0])
    monkeypatch.setattr(reset, "TEMPORARY", (folders[1],))
    monkeypatch.setattr(reset, "CHIP_LOCKS", folders[2])
    monkeypatch.setattr(reset, "_NEW_SECONDS", 0.0)
    return folders


def leave_behind(shared: Path, temporary: Path) -> list[Path]:
    """What a killed server leaves: segments, a semaphore, a compile service's folder and a socket."""
    segments = [shared / name for name in ("sglang_loads_0a_1b.shm", "sgl_shm_mq_4711_0a1b", "sem.mp-ab12cd_3")]
    for segment in segments:
        segment.write_bytes(b"x")
    folder = temporary / "tt-tpu-mesh-00ff"
    folder.mkdir()
    (folder / "compile.sock.lock").touch()
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(temporary / "tmpab12cd_3"))
    return [*segments, folder, temporary / "tmpab12cd_3"]


def test_what_the_dead_left_is_removed(places, capsys):
    """Each thing that goes is named; what is nobody's business here stays."""
    left = leave_behind(*places[:2])
    others = [places[0] / "other.shm", places[1] / "notes.txt", places[1] / "tmpab12cd_4"]
    for other in others:
        other.touch()
    assert cli.main(["reset"]) == 0
    assert not any(path.exists() for path in left) and all(path.exists() for path in others)
    said = capsys.readouterr().out
    assert all(f"removed {path}\n" in said for path in left)


def test_a_dry_run_removes_nothing(places, capsys):
    """It says what would be removed."""
    left = leave_behind(*places[:2])
    assert cli.main(["reset", "--dry-run"]) == 0
    assert all(path.exists() for path in left)
    said = capsys.readouterr().out
    assert all(f"would remove {path}\n" in said for path in left)


USE = "import mmap, sys; file = open(sys.argv[1], 'r+b'); data = mmap.mmap(file.fileno(), 1); print(flush=True); sys.stdin.read()"


def test_what_the_living_use_stays(places, capsys):
    """A segment that is mapped, a folder among a process's arguments and a bound socket are left, and it is said whose they are."""
    segment, folder = places[0] / "sgl_shm_mq_1_a", places[1] / "tt-tpu-mesh-00ff"
    segment.write_bytes(b"x")
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(places[1] / "tmpab12cd_3"))
        bound.listen()
        command = [sys.executable, "-c", USE, segment, folder / "compile.sock"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
            user.stdout.readline()
            assert cli.main(["reset"]) == 0
        said = capsys.readouterr().out
    assert f"left {segment}: process {user.pid} (" in said and f"left {folder}: process {user.pid} (" in said
    assert f"left {places[1] / 'tmpab12cd_3'}: a living process listens there" in said
    assert segment.exists() and folder.exists()


def test_what_was_just_made_stays(places, monkeypatch, capsys):
    """Its process may be about to open it."""
    monkeypatch.setattr(reset, "_NEW_SECONDS", 60.0)
    (left, *_) = leave_behind(*places[:2])
    assert cli.main(["reset"]) == 0
    assert left.exists() and f"left {left}: it was made just now" in capsys.readouterr().out


@pytest.fixture
def two_chips(monkeypatch):
    found = tuple(chips.Chip(index, "p150", 32 << 30, Path(f"/dev/tenstorrent/{index}")) for index in (0, 1))
    monkeypatch.setattr(chips, "silicon", lambda: found)
    monkeypatch.setattr(chips, "address", lambda index: f"0000:0{index + 1}:00.0")


def test_chips_on_which_a_process_was_killed(places, two_chips, monkeypatch, capsys):
    """`tt-smi -r` is advised for them by number, once; not for one whose process lives."""
    monkeypatch.setenv("TT_TPU_BACKEND", "auto")
    stale, alive = (places[2] / f"tt-tpu-chip-0000:0{place}:00.0.lock" for place in (2, 1))
    stale.write_text("4711")
    alive.write_text(str(os.getpid()))
    with alive.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cli.main(["reset"]) == 0
        assert "run `tt-smi -r 1`" in capsys.readouterr().out
        assert alive.exists() and not stale.exists()
        assert cli.main(["reset"]) == 0
        assert "no process was killed on a chip" in capsys.readouterr().out


def test_emulated_chips_need_no_reset(monkeypatch):
    """Nothing is advised where there is no silicon, or it is not used."""
    monkeypatch.setattr(chips, "silicon", lambda: ())
    assert not list(reset.advice(Settings(), ["0"]))
    assert not list(reset.advice(Settings(backend="emulated"), ["0"]))
