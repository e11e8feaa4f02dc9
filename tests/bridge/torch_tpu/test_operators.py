"""Operators of PyTorch's database, a sample of all kinds; benchmarks/op_conformance.py runs the rest."""

import json
import subprocess
import sys

import pytest
from chip_process import environment

# One or two of every kind: arithmetic, reductions, orders, views, indexing, random numbers,
# linear algebra, convolution, pooling, normalization, losses, attention, integers, complex numbers.
OPERATORS = (
    "add", "div_floor_rounding", "exp", "pow", "where", "clamp", "bitwise_xor", "gcd", "view_as_real",
    "sum", "amax", "argmin", "std", "cumsum", "logsumexp", "sort", "topk", "unique_consecutive",
    "cat", "flip", "as_strided", "diagonal_scatter", "gather", "scatter_add", "index_put", "masked_fill", "nonzero",
    "bernoulli", "nn_functional_dropout", "multinomial",
    "matmul", "einsum", "linalg_inv", "linalg_qr", "linalg_svd", "fft_fft",
    "nn_functional_conv2d", "nn_functional_max_pool2d", "nn_functional_layer_norm", "nn_functional_cross_entropy",
    "nn_functional_interpolate_bilinear", "nn_functional_scaled_dot_product_attention",
)  # fmt: skip


@pytest.fixture(scope="module")
def results(root, tmp_path_factory):
    """The benchmark's rows and its last line."""
    folder = tmp_path_factory.mktemp("operators")
    command = [sys.executable, root / "benchmarks/op_conformance.py", "--rows", folder / "rows", "--sample", "2"]
    done = subprocess.run(
        [*command, "--json", "--table", folder / "table.md", "--only", *OPERATORS],
        env=environment(folder), capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (folder / "rows").read_text().splitlines()]
    return rows, json.loads(done.stdout.splitlines()[-1]), done.stdout, (folder / "table.md").read_text()


def test_no_failure_is_ours(results):
    """Every operator passes in float32, bfloat16 and backward, but for torch_tpu's own gaps."""
    _, last, text, _ = results
    assert last["benchmark"] == "op_conformance"
    assert set(last["ratios"]) == {"pass_float32", "pass_bfloat16", "pass_gradient", "pass_other"}
    assert set(last["ratios"].values()) == {1.0}, text


def test_nearly_all_of_these_pass(results):
    """The operators were chosen among those that torch_tpu has: all samples of nine rows in ten pass."""
    rows, _, text, _ = results
    assert {row["operator"] for row in rows} == set(OPERATORS)
    passed = [row for row in rows if all(sample["kind"] == "pass" for sample in row["samples"])]
    assert len(passed) >= 0.9 * len(rows), text


def test_the_table_holds_every_operator(results):
    """--table writes a line an operator."""
    table = results[3].split("## All operators")[1]
    assert all(f"| {operator} |" in table for operator in OPERATORS)
