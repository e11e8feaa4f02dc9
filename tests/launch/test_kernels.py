"""`tt-tpu kernels` lists every known original once, with what stands in for it."""

import json

import pytest

from kernels_replacements.originals import REPLACEMENTS, known
from launch import cli


@pytest.fixture
def table(capsys):
    assert cli.main(["kernels", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_each_original_is_listed_once(table):
    """The replaced ones and the interpreted ones, each with package, version and kind."""
    originals = [row["original"] for row in table]
    assert len(originals) == len(set(originals)) > 150
    assert {one.original for one in REPLACEMENTS if one.package in ("jax", "torch_tpu")} <= set(originals)
    assert {row["how"] for row in table} == {"calls", "composed", "interpreted"}
    assert all((row["how"] == "calls") == bool(row["calls"]) for row in table)


def test_installed_versions_are_told(table):
    """JAX is installed here; a stack that is not says null."""
    versions = {row["package"]: row["installed"] for row in table}
    assert versions["jax"] and versions["vllm-torchtpu-core"] is None


def test_the_table_as_text(capsys):
    """A line an original, and a count of each kind at the end."""
    assert cli.main(["kernels"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("paged_attention_kernel.paged_attention" in x and "replaced by tt.paged" in x for x in lines)
    assert any("router_topk.router_topk" in x and "composed of plain JAX" in x for x in lines)
    assert any("philox_random_bits" in x and x.endswith("interpreted") for x in lines)
    assert lines[-1].endswith(f"{sum(row.how == 'interpreted' for row in known())} interpreted")
