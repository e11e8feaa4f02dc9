"""PyTorch's own operator database on the chip against the CPU: pass, torch_tpu's gap, or our failure.

Every operator of torch's op_db runs in float32, in bfloat16 and backward, or in what it takes
only. Child processes (op_child.py) run many operators each, so that an abort is a row and not
the end; what ended a child is run again in a new one, for certainty. Labels of the ratios:
pass_float32, pass_bfloat16, pass_gradient, pass_other: passed over attempted, without
torch_tpu's gaps (op_verdicts.py says what those are).

    python benchmarks/op_conformance.py [--only NAME ...] [--sample 4] [--jobs 1] [--table FILE] [--json]

All of it takes about ten minutes on two idle cores.
"""

import argparse
import dataclasses
import json
import os
import queue
import select
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from op_verdicts import Row, Sample, Verdict, counts, document, ratios

CHILD = Path(__file__).with_name("op_child.py")
# A child is renewed after so many rows, lest what one operator leaves behind reaches far.
BATCH = 100
# A child that says nothing for so long hangs.
SECONDS = 300
# An operator that has ended so many children is not tried further.
MOST_ENDS = 8
LOG_TAIL = 4000


class Died(Exception):
    """The child ended or hangs: "abort" or "timeout"."""


class Child:
    """A process that runs operators; `operators` maps each one's name to its dtypes."""

    def __init__(self, folder: Path):
        self._log = tempfile.TemporaryFile("w+", dir=folder, errors="replace")
        reading, writing = os.pipe()
        # The children share one compile service, and no cache of compiled programs with anybody.
        environment = os.environ | {
            "LIBTT_TPU_COMPAT": "1",
            "TT_TPU_SERVICE_DIR": str(folder / "service"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        }
        environment.pop("TORCH_TPU_TIER2_COMPILATION_CACHE", None)
        self._process = subprocess.Popen(
            [sys.executable, CHILD, str(writing)], stdin=subprocess.PIPE, stdout=self._log, stderr=self._log,
            pass_fds=[writing], env=environment, text=True,
        )  # fmt: skip
        os.close(writing)
        self._answers, self._rest = reading, b""
        try:
            self.operators = self.receive()["operators"]
        except Died:
            raise SystemExit(f"op_conformance: a child did not start: {last_words(self.words())}") from None

    def receive(self) -> dict:
        """The next message; raises Died."""
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], SECONDS)
            chunk = os.read(self._answers, 1 << 16) if ready else b""
            if not chunk:
                self._process.kill()
                self.close()
                raise Died("abort" if ready else "timeout")
            self._rest += chunk
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def send(self, **request) -> None:
        """Ask for one row."""
        self._log.seek(0)
        self._log.truncate()
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def words(self) -> str:
        """What the process has written since the last request."""
        self._log.seek(0)
        return self._log.read()

    def close(self) -> None:
        """End it, and wait for it."""
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)


@dataclasses.dataclass
class Runner:
    """Runs rows one after the other, in a child that is renewed when it has died or is worn."""

    folder: Path
    samples: int
    child: Child | None = None
    rows: int = 0

    def close(self) -> None:
        """End the child."""
        if self.child is not None:
            self.child.close()
        self.child, self.rows = None, 0

    def row(self, operator: str, dtype: str) -> Row:
        """All samples of one operator in one dtype."""
        done: dict[int, Sample] = {}
        suspect = None
        while sum(sample.kind in ("abort", "timeout") for sample in done.values()) < MOST_ENDS:
            end, at = self._run(operator, dtype, done)
            if end is None:
                break
            # Only what happens again in a new child is the operator's own doing.
            if suspect == at:
                words = self.child.words()
                done[at] = Sample(end, last_words(words), words[-LOG_TAIL:])
            suspect, self.child, self.rows = at, None, 0
            if at < 0 and at in done:
                break
        return Row(operator, dtype, tuple(done[index] for index in sorted(done)))

    def _run(self, operator: str, dtype: str, done: dict[int, Sample]) -> tuple[str | None, int]:
        """Fill `done`; how the child ended, None where it lives, and at which sample (-1: at none)."""
        if self.child is None or self.rows >= BATCH:
            self.close()
            self.child = Child(self.folder)
        self.rows += 1
        at = -1
        self.child.send(operator=operator, dtype=dtype, samples=self.samples, skip=sorted(done))
        try:
            while not (message := self.child.receive()).get("done"):
                at = message["sample"]
                if "kind" in message:
                    log = "" if message["kind"] in ("pass", "unsampled") else self.child.words()[-LOG_TAIL:]
                    done[at] = Sample(message["kind"], message.get("detail", ""), log)
        except Died as died:
            return str(died), at
        if "unsampled" in message:
            done[-1] = Sample("unsampled", message["unsampled"])
        return None, at


def last_words(words: str) -> str:
    """The line with which a process aborted, else its last one."""
    lines = [line for line in words.splitlines() if line.strip()] or ["without a word"]
    fatal = [line for line in lines if line.startswith("F0") or "Check failed" in line or "LLVM ERROR" in line]
    return fatal[0] if fatal else lines[-1]


def run(names: list[str] | None, samples: int, jobs: int, rows: list[Row], kept: Path | None) -> None:
    """Add what is missing to `rows`, and to the file `kept`, while it comes."""
    with tempfile.TemporaryDirectory(prefix="ttop-") as name:
        folder = Path(name)
        first = Child(folder)
        unknown = set(names or ()) - set(first.operators)
        if unknown:
            first.close()
            sys.exit(f"op_conformance: the database has no operator {', '.join(sorted(unknown))}")
        work: queue.Queue = queue.Queue()
        there = {(row.operator, row.dtype) for row in rows}
        for operator, dtypes in first.operators.items():
            if not names or operator in names:
                for dtype in dtypes:
                    if (operator, dtype) not in there:
                        work.put((operator, dtype))
        runners = [Runner(folder, samples) for _ in range(jobs)]
        runners[0].child = first
        with ThreadPoolExecutor(jobs) as pool:
            for ended in [pool.submit(_work, runner, work, rows, kept) for runner in runners]:
                ended.result()


def _work(runner: Runner, work: queue.Queue, rows: list[Row], kept: Path | None) -> None:
    while True:
        try:
            row = runner.row(*work.get_nowait())
        except queue.Empty:
            runner.close()
            return
        rows.append(row)
        print(row.operator, row.dtype, row.verdict.value, *row.reasons[:1], file=sys.stderr, flush=True)
        if kept:
            with kept.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(row)) + "\n")


def load(kept: Path | None) -> list[Row]:
    """The rows of an earlier run."""
    if kept is None or not kept.exists():
        return []
    found = [json.loads(line) for line in kept.read_text().splitlines()]
    return [Row(row["operator"], row["dtype"], tuple(Sample(**one) for one in row["samples"])) for row in found]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these operators, as the database names them")
    parser.add_argument("--sample", type=int, default=4, help="sample inputs an operator, spread over its own; 0: all")
    parser.add_argument("--jobs", type=int, default=1, help="children at once")
    parser.add_argument("--rows", type=Path, help="keep every row in this file, and do not run again what is in it")
    parser.add_argument("--table", type=Path, help="write the results to this file, as Markdown")
    parser.add_argument("--json", action="store_true", help="print the ratios as the last line")
    arguments = parser.parse_args()
    rows = load(arguments.rows)
    run(arguments.only, arguments.sample, arguments.jobs, rows, arguments.rows)
    rows.sort(key=lambda row: (row.operator, row.dtype))
    print(counts(rows))
    for row in rows:
        if row.verdict is Verdict.FAILURE:
            print(f"{row.operator} {row.dtype}: {'; '.join(row.reasons)}")
    if arguments.table:
        packages = ("torch", "torch_tpu", "lammps-jax-pjrt-cpu")
        versions = ", ".join(f"{package} {metadata.version(package)}" for package in packages)
        arguments.table.write_text(document(rows, arguments.sample, versions))
    if arguments.json:
        print(json.dumps({"benchmark": "op_conformance", "ratios": ratios(rows)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
