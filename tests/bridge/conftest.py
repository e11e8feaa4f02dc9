"""A machine of four boards that are not there."""

from pathlib import Path

import pytest


@pytest.fixture
def four_boards(tmp_path) -> Path:
    """The file with which a process sees a machine of four p150, chips 0 to 3."""
    cluster = tmp_path / "cluster.yaml"
    arches = "".join(f"  {chip}: blackhole\n" for chip in range(4))
    cluster.write_text(f"arch:\n{arches}boards:\n  -\n    - board_type: p150\n")
    return cluster
