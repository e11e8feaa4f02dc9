"""Runs a replacement as a program does: traced by JAX, its `tt.*` calls computed by the emulated chip."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(Path(__file__).resolve().parent.parent / place) for place in ("bridge/compiler", "originals")]


@pytest.fixture(scope="session")
def on_chip():
    """on_chip(function, *arrays): the results of a jitted function, as numpy arrays."""
    import chip
    import jax

    def run(function, *arrays):
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        program = str(jax.jit(function, keep_unused=True).lower(*shapes).compiler_ir("stablehlo"))
        return chip.run(program, *arrays)

    return run


@pytest.fixture(scope="session")
def in_compat():
    """in_compat(code, **environment): a process in which chips are TPUs, and JAX itself computes on the CPU."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess:
        settings = {"LIBTT_TPU_COMPAT": "1", "TT_TPU_BACKEND": "emulated", "JAX_PLATFORMS": "cpu"}
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=os.environ | settings | environment, capture_output=True, text=True, timeout=200,
        )  # fmt: skip

    return run
