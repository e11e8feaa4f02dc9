"""A library that needs CUDA libraries is loadable once stand-ins lie beside it."""

import ctypes
import subprocess

import pytest

from launch import torch_libraries

VERSIONED = "long cudaVersioned(void) { return 7; }"
UNVERSIONED = "long cudaPlain(void) { return 7; }"
USER = "long cudaVersioned(void); long cudaPlain(void); long sum(void) { return cudaVersioned() + cudaPlain(); }"


def compile_library(path, source, *options):
    """A shared library of C source."""
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", str(path), "-xc", "-", "-xnone", *options]
    subprocess.run(command, input=source, text=True, check=True)


@pytest.fixture
def torch_folder(tmp_path):
    """A folder like torch's, with one library whose two CUDA libraries have been taken away."""
    lib = tmp_path / "lib"
    lib.mkdir()
    (tmp_path / "map").write_text("libcudax.so.1 { global: *; };")
    compile_library(lib / "libcudax.so.1", VERSIONED, f"-Wl,--version-script={tmp_path / 'map'}")
    compile_library(lib / "libcuday.so.1", UNVERSIONED)
    needed = [str(lib / "libcudax.so.1"), str(lib / "libcuday.so.1")]
    compile_library(lib / "libuser.so", USER, *needed, "-Wl,-rpath,$ORIGIN")
    for library in needed:
        (tmp_path / "lib" / library).unlink()
    return tmp_path


def test_stand_ins_make_it_loadable(torch_folder):
    """Every missing library gets a stand-in, with and without symbol versions, whose functions say "no device"."""
    user = str(torch_folder / "lib" / "libuser.so")
    with pytest.raises(OSError, match="libcuda"):
        ctypes.CDLL(user)
    assert torch_libraries.complete(torch_folder) == ["libcudax.so.1", "libcuday.so.1"]
    assert ctypes.CDLL(user, mode=ctypes.RTLD_GLOBAL).sum() == 2 * torch_libraries.NO_DEVICE


def test_nothing_missing_changes_nothing(torch_folder):
    """Where the libraries are there, nothing is made."""
    torch_libraries.complete(torch_folder)
    before = sorted(torch_folder.rglob("*"))
    assert torch_libraries.complete(torch_folder) == []
    assert sorted(torch_folder.rglob("*")) == before
