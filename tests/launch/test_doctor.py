"""tt-tpu doctor says what is there, what is wrong and how to mend it, and never ends in a traceback."""

import json
import subprocess
import sys
import venv

import pytest

from launch import doctor


def run_doctor(root, *arguments, python=sys.executable, **environment) -> subprocess.CompletedProcess:
    """`tt-tpu doctor` in a process of its own."""
    command = [python, "-m", "launch.cli", "doctor", *arguments]
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(root / "build")} | environment
    return subprocess.run(command, env=clean, cwd=root, capture_output=True, text=True, timeout=300)


def test_a_sound_machine(root):
    """With everything in place the report holds the backend, why, and all versions, and the exit status is 0."""
    done = run_doctor(root, "--json", TT_TPU_BACKEND="emulated")
    report = json.loads(done.stdout)
    assert (done.returncode, report["problems"]) == (0, [])
    assert report["backend"] == "emulated"
    assert report["reason"] == "TT_TPU_BACKEND=emulated"
    assert len(report["chips"]) == 1
    assert all(report["versions"].values())
    assert all(pair_installed for _, pair_installed in report["pairs"])
    assert report["trial"] is True


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"TT_TPU_BACKEND": "gpu"}, ("TT_TPU_BACKEND='gpu'", "auto, libtt, emulated")),
        ({"TT_TPU_EMULATED_MEMORY": "much"}, ("TT_TPU_EMULATED_MEMORY='much'", "bytes")),
        ({"TT_TPU_INNER_PLUGIN": "nothing.so"}, ("TT_TPU_INNER_PLUGIN=nothing.so", "not a file")),
        ({"TT_TPU_BACKEND": "emulated", "TPU_LIBRARY_PATH": "other.so"}, ("TPU_LIBRARY_PATH=other.so", "unset")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unusable_settings(root, variables, words):
    """A setting that cannot be used is named, with what to do; exit status 1, no traceback."""
    done = run_doctor(root, **variables)
    assert done.returncode == 1
    assert all(word in done.stdout for word in words), done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_nothing_installed(root, tmp_path):
    """In an empty environment every missing package is a problem with a mend, in one JSON object, without a traceback."""
    venv.create(tmp_path / "empty")
    done = run_doctor(root, "--json", python=str(tmp_path / "empty/bin/python"))
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert set(report["versions"].values()) == {None}
    wrong = " ".join(problem["what"] for problem in report["problems"])
    assert all(package in wrong for package in doctor.PACKAGES)
    assert all(problem["mend"] for problem in report["problems"])


def test_untested_versions_are_a_problem(monkeypatch):
    """Versions that were never tested together are named as such."""
    versions = {package: "9.9.9" if package == "torch" else doctor.installed(package) for package in doctor.PACKAGES}
    monkeypatch.setattr(doctor, "installed", versions.get)
    monkeypatch.setattr(doctor, "try_chip", lambda: None)
    wrong = [problem.what for problem in doctor.examine().problems]
    assert f"torch 9.9.9 with torch_tpu {versions['torch_tpu']} was never tested" in wrong


def test_a_chip_that_fails_is_a_problem(monkeypatch):
    """When the product on the chip fails, the report holds the last line of the child's errors."""
    monkeypatch.setattr(doctor, "TRIAL", "raise SystemExit('the chip is on fire')")
    report = doctor.examine()
    assert report.trial is False
    assert doctor.Problem("a product on the chip failed", "the chip is on fire") in report.problems
