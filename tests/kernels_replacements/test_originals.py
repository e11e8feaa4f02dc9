"""Replacements give what the originals of vllm_torchtpu and tpu_inference answered (tests/originals)."""

import functools
import importlib
from pathlib import Path

import cases
import numpy as np
import pytest
from cases import CASES

EXPECTED = np.load(Path(cases.__file__).parent / "expected.npz")


def compact(x):
    """As the answers are kept: sums over all but the first two dimensions where there is much."""
    x = x.astype(np.float64)
    return x if x.size <= 50_000 else x.reshape(*x.shape[:2], -1).sum(-1)


@pytest.mark.parametrize("name", CASES)
def test_the_originals_answer(on_chip, name):
    """On the emulated chip, through whatever calls the replacement makes."""
    case = CASES[name]
    family, _, function = case.by.partition(":")
    run = getattr(importlib.import_module(f"kernels_replacements.{family}"), function)
    arrays = case.arrays()
    if any(array.dtype.itemsize == 1 for array in arrays):  # float8 makes no call, and the chip's client has none
        results = [np.asarray(run(*arrays, **case.options))]
    else:
        results = on_chip(functools.partial(run, **case.options), *arrays)
    results[0] = results[0][: case.live]
    for index, got in enumerate(results):
        expected = EXPECTED[f"{name}/{index}"].astype(np.float64)
        difference = np.abs(compact(got) - expected).max() / max(np.abs(expected).max(), 1e-9)
        assert difference <= max(case.tolerance, 1e-6), f"result {index} differs by {difference:.1e}"


def test_every_case_is_kept_and_small():
    """The answers on disk are those of the cases, and less than a megabyte."""
    assert {name.rpartition("/")[0] for name in EXPECTED.files} == set(CASES)
    assert (Path(cases.__file__).parent / "expected.npz").stat().st_size < 1 << 20
