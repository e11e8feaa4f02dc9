"""A third party's conformance harness finds no fault."""

import json
import subprocess
import sys

import pytest

from bridge.backend import PLUGIN


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    report = tmp_path_factory.mktemp("conformance") / "report.json"
    command = [sys.executable, "-m", "pypjrt.conform", str(PLUGIN), "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return {check["id"]: check for check in json.loads(report.read_text())["checks"]}


def test_nothing_fails(checks):
    """pypjrt.conform reports no FAIL, and the checks have really run."""
    assert [check for check in checks.values() if check["result"] == "fail"] == []
    assert sum(check["result"] == "pass" for check in checks.values()) >= 53


@pytest.mark.parametrize(
    "check",
    ("device.memory_stats", "device.clear_memory_stats", "device.coords", "topology.from_client",
     "topology.device_descriptions", "topology.serialize", "topology.deserialize", "topology.create_by_name",
     "compile.deserialize_and_load", "execute.single_device"),
)  # fmt: skip
def test_what_the_inner_plugin_lacks_is_supported(checks, check):
    """Memory statistics, coordinates and topologies are answered, not refused."""
    assert checks[check]["result"] == "pass", checks[check]
