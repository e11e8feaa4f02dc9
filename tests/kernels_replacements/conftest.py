"""Runs a replacement as a program does: traced by JAX, its `tt.*` calls computed by the emulated chip."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bridge" / "compiler"))


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
