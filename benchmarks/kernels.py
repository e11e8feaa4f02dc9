"""Kernels on the emulated chip against what they replace: the plain JAX formulation, and the original interpreted.

All programs run through the plugin in one process and take turns; a ratio is the median
over rounds. Labels: decode_vs_gather, paged decode attention against gathering every page
of the table (4 requests of 4,096 tokens, a table of 32,768 tokens a request), time of the
gather over time of the call; decode_vs_interpreted, JAX's paged attention kernel
interpreted over its replacement; update_small_vs_large, time of a cache update in a cache of 64
MiB over the time in one of 1 GiB: 1 where time does not depend on the cache's size.

    python benchmarks/kernels.py [--rounds 7] [--json]
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHILD = "--child"
BATCH, HEADS, KV_HEADS, DIM, PAGE = 4, 32, 8, 128, 64
TOKENS, TABLE_TOKENS, INTERPRETED_TOKENS = 4096, 32768, 512
WANTED = {"decode_vs_gather": 5.0, "decode_vs_interpreted": 1.0, "update_small_vs_large": 0.8}


class Chip:
    """The plugin, driven without torch: compiles exported JAX functions and runs them on buffers."""

    def __init__(self) -> None:
        import pypjrt

        from bridge.backend import PLUGIN

        self.client = pypjrt.Client.create(pypjrt.Plugin(PLUGIN))

    def put(self, array):
        """A buffer on the chip."""
        import numpy as np

        types = {"int32": 4, "float32": 11, "bfloat16": 13}
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        with self.client.device() as device:
            return self.client.buffer_from_host(raw, types[array.dtype.name], array.shape, device)

    def compile(self, function, *arrays, donate=()):
        """The function, exported for a TPU at the arrays' shapes and compiled for the chip."""
        import jax

        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        unchecked = [jax.export.DisabledSafetyCheck.custom_call("ALL")]
        jitted = jax.jit(function, donate_argnums=donate, keep_unused=True)
        exported = jax.export.export(jitted, platforms=["tpu"], disabled_checks=unchecked)(*shapes)
        return self.client.compile(exported.mlir_module())

    def fetch(self, buffer) -> bytes:
        """The buffer's contents: done when the program that makes it is."""
        raw = bytearray(buffer.nbytes)
        buffer.to_host(raw)
        return bytes(raw)


def seconds(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compared(slow, fast, rounds: int) -> tuple[float, float, float]:
    """Median times of both, taking turns, and the median of their ratios."""
    slow(), fast()
    pairs = [(seconds(slow), seconds(fast)) for _ in range(rounds)]
    return (
        statistics.median(s for s, _ in pairs),
        statistics.median(f for _, f in pairs),
        statistics.median(s / f for s, f in pairs),
    )


def paged(tokens: int, table_tokens: int, heads_first: bool):
    """Query, caches, table and positions of BATCH requests; caches hold their tokens and no more."""
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(0)
    used = tokens // PAGE
    pages = BATCH * used
    shape = (KV_HEADS, pages, PAGE, DIM) if heads_first else (pages, KV_HEADS, PAGE, DIM)
    q = rng.standard_normal((BATCH, HEADS, DIM), np.float32).astype(ml_dtypes.bfloat16)
    k, v = (rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for _ in range(2))
    table = np.full((BATCH, table_tokens // PAGE), -1, np.int32)
    table[:, :used] = rng.permutation(pages).reshape(BATCH, used)
    return q, k, v, table, np.full(BATCH, tokens - 1, np.int32)


def gather_all(q, k_cache, v_cache, table, positions):
    """Decode attention as plain JAX writes it: gather every page of the table, then one masked softmax."""
    import jax
    import jax.numpy as jnp

    there = (table >= 0)[:, :, None, None, None]

    def gathered(cache):
        held = jnp.where(there, cache[jnp.maximum(table, 0)], 0)
        return held.transpose(0, 2, 1, 3, 4).reshape(BATCH, KV_HEADS, -1, DIM)

    grouped = q.reshape(BATCH, KV_HEADS, -1, DIM)
    scores = jnp.einsum("bkgd,bksd->bkgs", grouped, gathered(k_cache), preferred_element_type=jnp.float32) * DIM**-0.5
    seen = jnp.arange(scores.shape[3]) <= positions[:, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), -1).astype(q.dtype)
    out = jnp.einsum("bkgs,bksd->bkgd", weights, gathered(v_cache), preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)


def by_call(q, k_cache, v_cache, table, positions):
    from kernels_replacements import tt_calls

    return tt_calls.paged_attention_decode(q[None], k_cache, v_cache, table, positions)[0]


def runner(chip: Chip, function, arrays):
    """A function that runs the program once and waits; and its result as float32."""
    import ml_dtypes
    import numpy as np

    program, buffers = chip.compile(function, *arrays), [chip.put(array) for array in arrays]
    result = np.frombuffer(chip.fetch(program(*buffers)[0]), ml_dtypes.bfloat16).astype(np.float32)
    return lambda: chip.fetch(program(*buffers)[0]), result


def decode_vs_gather(chip: Chip, rounds: int) -> float:
    arrays = paged(TOKENS, TABLE_TOKENS, heads_first=False)
    return race("decode_vs_gather", chip, gather_all, by_call, arrays, rounds)


def decode_vs_interpreted(chip: Chip, rounds: int) -> float:
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as replaced

    q, k, v, table, positions = paged(INTERPRETED_TOKENS, INTERPRETED_TOKENS, heads_first=True)
    arrays = (q, k, v, positions + 1, table)
    options = {"pages_per_compute_block": 4}
    original = functools.partial(replaced.__wrapped__, **options)
    return race("decode_vs_interpreted", chip, original, functools.partial(replaced, **options), arrays, rounds)


def race(label: str, chip: Chip, slow, fast, arrays, rounds: int) -> float:
    """The ratio of two functions that compute the same."""
    import numpy as np

    (slow_run, expected), (fast_run, got) = (runner(chip, function, arrays) for function in (slow, fast))
    difference = np.abs(got - expected).max() / np.abs(expected).max()
    if not difference < 2e-2:
        sys.exit(f"kernels: {label}: the two differ by {difference:.3f}")
    slow_time, fast_time, ratio = compared(slow_run, fast_run, rounds)
    print(f"{label}: {slow_time * 1e3:.2f} ms against {fast_time * 1e3:.2f} ms: {ratio:.2f}", flush=True)
    return ratio


def update_small_vs_large(chip: Chip, rounds: int) -> float:
    """Updates in place, the cache handed on from step to step; 16 steps a measurement."""
    import ml_dtypes
    import numpy as np

    from kernels_replacements import tt_calls

    def update(cache, x, positions, table):
        cache = tt_calls.paged_update_cache(cache, x, positions, table)
        return cache, cache[0, 0, 0]

    def stepper(megabytes: int):
        pages = (megabytes << 20) // (KV_HEADS * PAGE * DIM * 2)
        cache = np.zeros((pages, KV_HEADS, PAGE, DIM), ml_dtypes.bfloat16)
        x = np.ones((1, BATCH, KV_HEADS, DIM), ml_dtypes.bfloat16)
        table = np.random.default_rng(0).permutation(pages)[: BATCH * 8].reshape(BATCH, 8).astype(np.int32)
        arrays = (cache, x, np.arange(BATCH, dtype=np.int32) * 70, table)
        program = chip.compile(update, *arrays, donate=(0,))
        held, *rest = [chip.put(array) for array in arrays]

        def run():
            nonlocal held
            for _ in range(16):
                held, probe = program(held, *rest)
            chip.fetch(probe)

        return run

    small, large, ratio = compared(stepper(64), stepper(1024), rounds)
    print(f"update_small_vs_large: {small / 16 * 1e6:.0f} us in 64 MiB, {large / 16 * 1e6:.0f} us in 1 GiB: {ratio:.2f}", flush=True)  # fmt: skip
    return ratio


def child(rounds: int) -> None:
    """Measure everything in this process, in which chips are TPUs, and print the ratios as the last line."""
    chip = Chip()
    measured = {f.__name__: f(chip, rounds) for f in (decode_vs_gather, decode_vs_interpreted, update_small_vs_large)}
    print(json.dumps({label: round(ratio, 3) for label, ratio in measured.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each pair")
    parser.add_argument("--json", action="store_true", help="print the ratios as JSON in the last line")
    parser.add_argument(CHILD, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.rounds)
        return
    settings = {"LIBTT_TPU_COMPAT": "1", "TT_TPU_BACKEND": "emulated", "JAX_PLATFORMS": "cpu", "TT_TPU_LOG": "error"}
    command = [sys.executable, __file__, CHILD, "--rounds", str(options.rounds)]
    done = subprocess.run(command, env=os.environ | settings, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit("kernels: the measuring process failed")
    *lines, last = done.stdout.splitlines()
    print("\n".join(lines))
    ratios = json.loads(last)
    for label, ratio in ratios.items():
        print(f"{label}: {ratio:.2f} (at least {WANTED[label]} is wanted)")
    if options.json:
        print(json.dumps({"benchmark": "kernels", "ratios": ratios}))


if __name__ == "__main__":
    main()
