"""What the bridge costs at run time: torch_tpu through our plugin against the bare inner plugin.

The peer (minimal_plugin.cc) is the same inner plugin with the fewest overrides
that let torch_tpu run. Children of both kinds take turns; each figure is the
best of a child's rounds, each ratio the median over pairs of children that ran
one after the other. Labels: mlp, a compiled training-free step of three linear
layers; eager, a chain of single operations.

    python benchmarks/overhead.py [--pairs 5] [--json]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLUGIN_SOURCES = ROOT / "bridge" / "plugin"
WORKLOADS = ("mlp", "eager")


def build_peer(folder: Path) -> Path:
    """Compile the minimal plugin into `folder`; the compiler is $CXX or c++."""
    header = folder / "pjrt_c_api.h"
    with header.open("w") as out:
        subprocess.run([sys.executable, PLUGIN_SOURCES / "generate_pjrt_header.py"], stdout=out, check=True)
    library = folder / "libminimal.so"
    include = Path(sysconfig.get_paths()["purelib"]) / "jaxlib" / "include"
    sources = [*PLUGIN_SOURCES.glob("*.cc"), *(PLUGIN_SOURCES / "ffi").glob("*.cc"), ROOT / "benchmarks" / "minimal_plugin.cc"]
    objects = []
    for source in sources:
        objects.append(folder / f"{source.parent.name}_{source.stem}.o")
        rename = ["-DGetPjrtApi=GetFullPjrtApi"] if source.name == "plugin.cc" else []
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-w", *rename,
                   f"-I{ROOT}", f"-I{PLUGIN_SOURCES}", f"-I{folder}", f"-I{include}", "-c", source, "-o", objects[-1]]  # fmt: skip
        subprocess.run(command, check=True)
    subprocess.run([os.environ.get("CXX", "c++"), "-shared", "-o", library, *objects, "-ldl", "-lpthread", "-Wl,-Bsymbolic"], check=True)  # fmt: skip
    return library


def mlp_step():
    """A function that runs one compiled step and waits for it."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256)]
    model = torch.compile(torch.nn.Sequential(*layers).to("tpu"))
    x = torch.randn(32, 256).to("tpu")

    def step():
        with torch.no_grad():
            model(x)
        torch.accelerator.synchronize()

    return step


def eager_step():
    """A function that runs a chain of 64 single operations and waits for it."""
    import torch

    x = torch.randn(64, 64).to("tpu")

    def step():
        y = x
        for _ in range(32):
            y = (y + x) * 0.5
        torch.accelerator.synchronize()

    return step


def child(workload: str) -> None:
    """Print the best time of a step, in seconds, over a hundred rounds."""
    step = {"mlp": mlp_step, "eager": eager_step}[workload]()
    for _ in range(20):
        step()
    best = float("inf")
    for _ in range(100):
        start = time.perf_counter()
        for _ in range(20):
            step()
        best = min(best, (time.perf_counter() - start) / 20)
    print(best)


def measure(workload: str, library: Path | None, caches: Path) -> float:
    """Seconds a step takes in a child of its own; `library` is the peer, None our plugin."""
    environment = {k: v for k, v in os.environ.items() if k not in ("TPU_LIBRARY_PATH", "TT_TPU_PLUGIN_CONFIG")}
    environment |= {"LIBTT_TPU_COMPAT": "1", "TT_TPU_BACKEND": "emulated", "TT_TPU_LOG": "error"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(caches / ("ours" if library is None else "peer"))
    if library is not None:
        environment["TPU_LIBRARY_PATH"] = str(library)
    command = [sys.executable, __file__, "--child", workload]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"overhead: a child failed:\n{done.stderr[-3000:]}")
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5, help="children of each kind for a workload")
    parser.add_argument("--json", action="store_true", help="print the ratios as JSON in the last line")
    parser.add_argument("--child", choices=WORKLOADS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        peer = build_peer(Path(folder))
        for workload in WORKLOADS:
            pairs = []
            for _ in range(options.pairs):
                ours, bare = (measure(workload, library, Path(folder)) for library in (None, peer))
                pairs.append(ours / bare)
                print(f"{workload}: {ours * 1e6:.0f} us with the bridge, {bare * 1e6:.0f} us without: {pairs[-1]:.3f}", flush=True)
            ratios[workload] = round(statistics.median(pairs), 4)
    for workload, ratio in ratios.items():
        print(f"{workload}: {ratio:.3f} (time with over time without; at most 1.03 is wanted)")
    if options.json:
        print(json.dumps({"benchmark": "overhead", "ratios": ratios}))


if __name__ == "__main__":
    main()
