"""Asks the originals, compares the replacements with them, and keeps the originals' answers.

    python tests/originals/ask.py [--write]

Runs in the environment that `make test-originals` makes: CPython 3.12, jax 0.11.2, the two
packages without their dependencies. `tt.*` calls are computed by the emulated chip's own
functions, on the CPU. With --write the answers become tests/originals/expected.npz.
"""

import importlib
import inspect
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

from importlib.abc import Loader, MetaPathFinder  # noqa: E402
from importlib.machinery import ModuleSpec  # noqa: E402
from unittest.mock import MagicMock  # noqa: E402


class Absent(MetaPathFinder, Loader):
    """Stands for packages that the originals import and their kernels do not use (torch, vllm, requests)."""

    names = ("torch", "torch_tpu", "torchax", "vllm", "requests", "transformers", "flax", "ray", "cloudpickle")

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.names else None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__name__ = spec, [], spec.name
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(Absent())

import jax  # noqa: E402
import numpy as np  # noqa: E402
from cases import CASES, Case  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402


def compute_calls_here() -> None:
    """Give `tt.*` calls their meaning without a chip."""
    from bridge.emulator.calls import CALLS
    from kernels_replacements import tt_calls

    def call(target, results, *operands, aliases=None, **attributes):
        del results, aliases
        return CALLS[target](*operands, **attributes)

    tt_calls._call = call


def load(name: str, package: str = ""):
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(f"{package}{module}"), function)


def accepted(function, options: dict) -> dict:
    """The options that a function takes: references lack some of their kernel's."""
    return {name: value for name, value in options.items() if name in inspect.signature(function).parameters}


def answers(function, case: Case, options: dict) -> list[np.ndarray]:
    """Results as float64, rows of no sequence left out."""
    arrays = [None if array is None else jax.numpy.asarray(array) for array in case.arrays()]
    results = [np.asarray(x).astype(np.float64) for x in jax.tree.leaves(function(*arrays, **options))]
    return [results[0][: case.live], *results[1:]]


def error(got: np.ndarray, expected: np.ndarray) -> float:
    assert got.shape == expected.shape, f"{got.shape} for {expected.shape}"
    return float(np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-9))


def ask(case: Case) -> list[np.ndarray]:
    """What the original answers: the kernel interpreted, or the reference published beside it."""
    original = load(case.original)
    if original.__name__.startswith("ref"):
        return answers(original, case, accepted(original, case.options))
    chip = jax.sharding.AbstractDevice("TPU v5p", 1, "tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=chip)
    with pltpu.force_tpu_interpret_mode(), jax.sharding.use_abstract_mesh(mesh):
        return answers(original, case, case.options | case.only)


def main(write: bool, only: str = "") -> int:
    compute_calls_here()
    kept, failed = {}, 0
    for name, case in ((n, c) for n, c in CASES.items() if only in n):
        try:
            expected = ask(case)
            got = answers(load(case.by, "kernels_replacements."), case, case.options)
            worst = max(map(error, got, expected))
        except Exception as reason:  # the next case is asked all the same
            print(f"FAILED {name}: {type(reason).__name__}: {str(reason)[:300]}", flush=True)
            failed += 1
            continue
        good = worst <= case.tolerance
        failed += not good
        print(f"{'passed' if good else 'FAILED'} {name}: largest difference {worst:.2e}", flush=True)
        kept[name] = expected
    print(f"{len(CASES) - failed} passed, {failed} failed")
    if write and not failed:
        np.savez_compressed(HERE / "expected.npz", **{f"{n}/{i}": compact(x) for n, r in kept.items() for i, x in enumerate(r)})
    return 1 if failed else 0


def compact(x: np.ndarray) -> np.ndarray:
    """An answer that is small: whole up to 50,000 numbers, else sums over all but the first two dimensions."""
    x = x if x.size <= 50_000 else x.reshape(*x.shape[:2], -1).sum(-1)
    return x if np.issubdtype(x.dtype, np.integer) else x.astype(np.float32)


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv))
