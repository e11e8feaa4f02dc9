"""Collectives between processes on emulated chips, against torch.distributed's Gloo on CPU tensors in the same processes.

Time for one of a hundred collectives chained in one compiled program, over the time for one of a hundred of Gloo's on
tensors of the same size, both the best of a few rounds and of the slowest rank. Beside them: one eager collective
from its call until its result is there, and how the bytes that a rank moves compare with what it can copy
while the other ranks copy too.

    python benchmarks/collectives.py [--worlds 2 4] [--sizes 4k 256k 4m 64m] [--ops all_reduce all_gather] [--json]

Sizes are of each rank's tensor. Labels: all_reduce_4k_2 is an all_reduce of 4 KiB between 2 processes; the ratio is Gloo's
time over ours.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

SIZES = {"4k": 4 << 10, "256k": 256 << 10, "4m": 4 << 20, "64m": 64 << 20}
OPS = ("all_reduce", "all_gather")
CHAINED = 100


@dataclass(frozen=True)
class Figures:
    """Seconds for one collective, three ways, and the share of the copying speed that the chained one reaches."""

    label: str
    ours: float
    gloo: float
    eager: float
    of_bandwidth: float

    @property
    def ratio(self) -> float:
        return self.gloo / self.ours


def best(step: Callable[[], None], rounds: int) -> float:
    """The least seconds of a step, which all ranks begin together; of the slowest rank."""
    import torch
    import torch.distributed as dist

    least = float("inf")
    for _ in range(rounds):
        dist.barrier(group=cpu_group())
        start = time.perf_counter()
        step()
        took = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(took, dist.ReduceOp.MAX, group=cpu_group())
        least = min(least, took.item())
    return least


def cpu_group():
    """Gloo's group of all ranks."""
    global _cpu_group
    if _cpu_group is None:
        import torch.distributed as dist

        _cpu_group = dist.new_group(backend="gloo")
    return _cpu_group


_cpu_group = None


def chained(op: str, elements: int):
    """A compiled function of `CHAINED` collectives, each of which takes the one before it."""
    import torch
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    group = dist.group.WORLD

    @torch.compile
    @torch.tpu.distributed.spmd_safe
    def program(x):
        for _ in range(CHAINED):
            if op == "all_reduce":
                x = functional.all_reduce(x, "sum", group)
            else:
                x = functional.all_gather_tensor(x, 0, group)[-elements:]
        return x

    return program


def eager(op: str, x, gathered, group=None) -> None:
    """One collective of torch.distributed."""
    import torch.distributed as dist

    if op == "all_reduce":
        dist.all_reduce(x, group=group)
    else:
        dist.all_gather_into_tensor(gathered, x, group=group)


def moved(op: str, size: int, world: int) -> int:
    """Bytes that a rank must read and write at least: what others need of it, and its result."""
    if op == "all_gather":
        return 2 * size * (1 + world)
    return 2 * size * (world - 1) // world * 2 + 2 * size


def copy_speed() -> float:
    """Bytes a second that a rank reads and writes while all ranks copy."""
    import torch

    source = torch.ones(64 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / best(lambda: target.copy_(source), 5)


def measure(op: str, size: int, world: int, label: str, speed: float) -> Figures:
    """All figures of one operation and size."""
    import torch

    elements, rounds = size // 4, 5 if size <= 1 << 20 else 2
    program, x = chained(op, elements), torch.zeros(elements).to("tpu")
    gathered = torch.zeros(elements * world).to("tpu")

    def ours():
        program(x)
        torch.accelerator.synchronize()

    def single():
        eager(op, x, gathered)
        torch.accelerator.synchronize()

    host, host_gathered = torch.zeros(elements), torch.zeros(elements * world)

    def gloo():
        for _ in range(CHAINED):
            eager(op, host, host_gathered, cpu_group())

    ours(), single(), eager(op, host, host_gathered, cpu_group())  # compiled, connected
    seconds = best(ours, rounds) / CHAINED
    share = moved(op, size, world) / seconds / speed
    return Figures(label, seconds, best(gloo, rounds) / CHAINED, best(single, 10), share)


def rank_main(ops: list[str], sizes: list[str]) -> None:
    """In each rank: measure everything; rank 0 prints a line of JSON a figure."""
    import torch.distributed as dist

    dist.init_process_group("cpu:gloo,tpu:tpu_dist")
    rank, world = dist.get_rank(), dist.get_world_size()
    speed = copy_speed()
    for op in ops:
        for size in sizes:
            figures = measure(op, SIZES[size], world, f"{op}_{size}_{world}", speed)
            if rank == 0:
                print("figures " + json.dumps(asdict(figures)), flush=True)
    dist.destroy_process_group()


def run(world: int, ops: list[str], sizes: list[str]) -> list[Figures]:
    """The figures for `world` processes."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TT_TPU_CACHE_DIR": f"{folder}/programs"}
        environment = os.environ | caches | {
            "LIBTT_TPU_COMPAT": "1", "TT_TPU_BACKEND": "emulated", "TT_TPU_LOG": "error", "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), __file__]
        command += ["--rank", "--ops", *ops, "--sizes", *sizes]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"collectives: the ranks failed:\n{done.stderr[-4000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("figures ")]
    return [Figures(**json.loads(line.removeprefix("figures "))) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="numbers of processes")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="of each rank's tensor")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--json", action="store_true", help="print the ratios as JSON in the last line")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.ops, options.sizes)
        return
    ratios = {}
    for world in options.worlds:
        for figures in run(world, options.ops, options.sizes):
            ratios[figures.label] = round(figures.ratio, 2)
            print(
                f"{figures.label}: {figures.ours * 1e6:.0f} us chained, {figures.eager * 1e6:.0f} us for a single eager one, "
                f"{figures.gloo * 1e6:.0f} us with Gloo: {figures.ratio:.2f} times faster, "
                f"{figures.of_bandwidth:.0%} of the copying speed",
                flush=True,
            )
    if options.json:
        print(json.dumps({"benchmark": "collectives", "ratios": ratios}))


if __name__ == "__main__":
    main()
