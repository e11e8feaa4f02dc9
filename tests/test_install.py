"""What an installation, as a wheel or editable, puts where, and what it does to an interpreter that does not ask for it."""

import os
import subprocess
import sys
import venv

import pytest

PACKAGES = ("bridge", "kernels_replacements", "launch", "mesh_descriptors", "scikit_build_core", "_tt_tpu")


def run(*command, **options) -> subprocess.CompletedProcess:
    """Run a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module", params=["build_wheel", "build_editable"])
def python(request, root, tmp_path_factory):
    """The interpreter of a new environment that holds nothing but this project, installed as a wheel or editable."""
    folder = tmp_path_factory.mktemp(request.param)
    source = f"import sys; sys.path.insert(0, 'bridge/plugin'); import build_backend; build_backend.{request.param}({str(folder)!r})"
    run(sys.executable, "-c", source, cwd=root)
    venv.create(folder / "environment")
    interpreter = str(folder / "environment/bin/python")
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "pip", "--python", interpreter, "install", "--no-deps", "--no-index", str(wheel))
    return interpreter


def imported(python: str, compat: str | None) -> str:
    """What a program that does nothing imports of this project with LIBTT_TPU_COMPAT as given."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LIBTT", "TT_TPU", "TPU"))}
    environment |= {} if compat is None else {"LIBTT_TPU_COMPAT": compat}
    report = run(python, "-X", "importtime", "-c", "pass", env=environment, cwd="/").stderr
    names = (line.rpartition("|")[2].strip() for line in report.splitlines())
    return " ".join(name for name in names if name.startswith(PACKAGES))


@pytest.mark.parametrize("compat", [None, "0", ""])
def test_without_compat_nothing_is_imported(python, compat):
    """LIBTT_TPU_COMPAT unset, empty or 0 imports nothing."""
    assert imported(python, compat) == ""


def test_with_compat_the_bridge_starts(python):
    """LIBTT_TPU_COMPAT=1 imports the start-up module."""
    assert "bridge.startup" in imported(python, "1").split()


def test_the_plugin_lies_where_the_bridge_looks(python):
    """The shared library is installed where bridge.backend looks for it, and shows only its own functions."""
    found = run(python, "-c", "from bridge.backend import PLUGIN; print(PLUGIN)", cwd="/").stdout.strip()
    symbols = run("nm", "-D", "--defined-only", found).stdout.split()[2::3]
    assert {"GetPjrtApi", "GetInnerPjrtApi"} <= set(symbols)
    assert all(symbol.startswith(("Get", "TtTpu")) for symbol in symbols)


def test_the_command_is_there(python):
    """The console script tt-tpu runs without any other package."""
    assert "tt-tpu-bridge" in run(python.replace("/python", "/tt-tpu"), "--version", cwd="/").stdout
