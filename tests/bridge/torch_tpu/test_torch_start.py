"""What LIBTT_TPU_COMPAT does to an interpreter, whatever is imported first, and what it says when it cannot."""

import subprocess
import sys
import time

import pytest
from chip_process import environment, run_python

from bridge.backend import PLUGIN

COMPUTE = """
x = torch.arange(6.0, device="tpu").reshape(2, 3)
print((x @ x.mT).tolist(), torch.accelerator.current_accelerator(), torch.accelerator.device_count())
"""
ANSWER = "[[5.0, 14.0], [14.0, 50.0]] tpu 1"


def complaint(done) -> str:
    """The one line in which a program that could not start says why."""
    assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("tt-tpu: "))
    return line


@pytest.mark.parametrize("imports", ("import torch", "import torch_tpu, torch", "import torch, torch_tpu"))
def test_import_order(tmp_path, imports):
    """Whichever is imported first, the device is there and computes; one line says what stands behind it."""
    done = run_python(f"{imports}\n{COMPUTE}", environment(tmp_path))
    assert done.stdout.strip().endswith(ANSWER), done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("tt-tpu: "))
    assert "emulated p150" in line


def test_children_do_not_announce_again(tmp_path):
    """The line that says what stands behind the TPU appears once for a tree of processes."""
    source = "import subprocess, sys, torch; subprocess.run([sys.executable, '-c', 'import torch'], check=True)"
    done = run_python(source, environment(tmp_path))
    assert done.returncode == 0 and done.stderr.count("tt-tpu: ") == 1, done.stderr


@pytest.mark.parametrize("compat", (None, "0"))
def test_without_compat_nothing_changes(tmp_path, compat):
    """LIBTT_TPU_COMPAT unset or 0: no import, no import hook, no environment variable and not a word of ours."""
    source = "import os, sys; print(*sys.modules, *sys.meta_path, *(n for n in os.environ if 'T' in n), sep='\\n')"
    variables = environment(tmp_path)
    del variables["LIBTT_TPU_COMPAT"]
    variables |= {} if compat is None else {"LIBTT_TPU_COMPAT": compat}
    command = [sys.executable, "-X", "importtime", "-c", source]
    done = subprocess.run(command, env=variables, cwd="/", capture_output=True, text=True, check=True)
    assert "sys" in done.stdout.split() and "site" in done.stderr
    for word in ("bridge", "kernels_replacements", "TPU_LIBRARY_PATH", "TT_TPU_PLUGIN_CONFIG", "TORCHINDUCTOR"):
        assert word not in done.stdout + done.stderr


def test_a_library_of_the_users_is_used(tmp_path):
    """TPU_LIBRARY_PATH is respected: that plugin is loaded, not ours, and a line says so."""
    library = tmp_path / "users.so"
    library.symlink_to(PLUGIN)
    source = f"import os, torch\n{COMPUTE}\nprint(os.environ['TPU_LIBRARY_PATH'])"
    done = run_python(source, environment(tmp_path, TPU_LIBRARY_PATH=str(library)))
    assert done.stdout.splitlines()[-2:] == [ANSWER, str(library)], done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("tt-tpu: "))
    assert f"TPU_LIBRARY_PATH={library}" in line and "not the bridge's" in line


@pytest.mark.parametrize(
    ("variables", "words"),
    (
        ({"TT_TPU_BACKEND": "gpu"}, ("TT_TPU_BACKEND='gpu'", "auto, libtt, emulated")),
        ({"TT_TPU_BACKEND": "libtt"}, ("TT_TPU_BACKEND=libtt", "no chip", "emulated")),
        ({"TT_TPU_EMULATED_MEMORY": "-1G"}, ("TT_TPU_EMULATED_MEMORY='-1G'", "8G")),
        ({"TT_TPU_INNER_PLUGIN": "/nowhere.so"}, ("TT_TPU_INNER_PLUGIN=/nowhere.so", "not a file")),
        ({"TT_TPU_LOG": "loud"}, ("TT_TPU_LOG='loud'", "debug, info, warning, error")),
        ({"WORLD_SIZE": "7", "RANK": "5"}, ("no mesh of 7 chips", "1, 2, 3, 4, 6, 8")),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ("RANK=2 of 2 processes", "from 0 to 1")),
    ),
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unusable_settings(tmp_path, variables, words):
    """`import torch` ends with one line that names the setting and what to do, and no traceback."""
    done = run_python("import torch; print('went on')", environment(tmp_path, **variables))
    line = complaint(done)
    assert all(word in line for word in words), line
    assert "went on" not in done.stdout


def test_unusable_settings_leave_other_programs_alone(tmp_path):
    """A program that needs no chip runs whatever the settings say."""
    done = run_python("import json; print('ran')", environment(tmp_path, TT_TPU_BACKEND="gpu"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")


def test_the_service_ends_with_the_program(tmp_path):
    """Seconds after the last client has gone, no compile process and no socket is left."""
    folder = tmp_path / "s"
    done = run_python(f"import torch\n{COMPUTE}", environment(tmp_path, TT_TPU_SERVICE_DIR=str(folder)))
    assert ANSWER in done.stdout, done.stderr
    deadline = time.monotonic() + 20
    while (folder / "compile.sock").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
