"""The real libtt, in mock mode: it compiles for chips that are only described.

`make test` installs it into .libtt beside the environment, so that its own start-up
file and JAX plugin stay out of everything else.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

ROOT = Path(__file__).resolve().parent.parent.parent
CLUSTER = Path(__file__).parent / "p150.yaml"


@pytest.fixture(scope="session")
def libtt() -> Path:
    """libtt's library."""
    (library,) = (ROOT / ".libtt").glob("jax_plugins/*/libtt.so")
    return library


@pytest.fixture(scope="session")
def mock_environment(tmp_path_factory) -> dict[str, str]:
    """The environment in which libtt compiles for one p150 that is not there."""
    # A folder of its own: two libtt processes that share one race on a file in it.
    temporary = tmp_path_factory.mktemp("libtt")
    return os.environ | {
        "TT_METAL_MOCK_CLUSTER_DESC_PATH": str(CLUSTER),
        "TTMLIR_DISABLE_MOCK_DEVICE": "1",
        "TMPDIR": str(temporary),
        "TT_METAL_CACHE": str(temporary / "kernels"),
    }


@pytest.fixture(scope="session")
def compile_on_libtt(libtt, mock_environment, tmp_path_factory):
    """compile_on_libtt({name: program}): {name: error or ""}, all in one process.

    For several chips that run a program together: their number, and the environment's further variables.
    """

    def run(programs: dict[str, str], chips: int = 1, **environment: str) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("programs")
        questions, answers = folder / "programs.json", folder / "results.json"
        questions.write_text(json.dumps(programs))
        command = [sys.executable, Path(__file__).parent / "compile_on_libtt.py", libtt, questions, answers, str(chips)]
        done = subprocess.run(command, env=mock_environment | environment, cwd=folder, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return json.loads(answers.read_text())

    return run
