"""Look at chips, backend and installed versions, and say what is wrong and how to mend it.

Nothing heavy is imported: versions are read from the installed packages'
metadata, and the chip is tried in a child process, so that whatever is broken
is a line of the report and not the end of it.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge import __version__, backend, chips, settings
from bridge.errors import BridgeError
from launch import server

PYTHONS = ((3, 11), (3, 12))
PACKAGES = ("torch", "torch_tpu", "jax", "jaxlib", "sglang", "lammps-jax-pjrt-cpu")
# Pairs of versions that this project's tests run with.
KNOWN_PAIRS = (
    {"torch": "2.13.0", "torch_tpu": "0.2.0"},
    {"torch": "2.13.0", "sglang": "0.5.23"},
    {"jax": "0.10.2", "jaxlib": "0.10.2"},
    {"jaxlib": "0.10.2", "lammps-jax-pjrt-cpu": "0.11.2"},
)
STARTER = "tt_tpu_bridge.pth"
MEND_INSTALL = "pip install --no-deps -r requirements.txt"
TRIAL_SECONDS = 180
TRIAL_WORDS = {True: "right", False: "failed", None: "not tried"}
TRIAL = """
import torch
x = torch.arange(6.0, device="tpu").reshape(2, 3)
assert (x @ x.T).cpu().tolist() == [[5.0, 14.0], [14.0, 50.0]], "the chip computed a wrong product"
"""


@dataclass(frozen=True)
class Problem:
    """Something wrong, and how to mend it."""

    what: str
    mend: str


@dataclass(frozen=True)
class Report:
    """What doctor found; `--json` prints exactly these fields.

    Attributes:
        bridge: version of this project.
        python: version of the interpreter.
        chips: one description a chip.
        backend: name of the chosen backend, None if there is none.
        reason: why it was chosen, or why none could be.
        inner_plugin: file of the inner plugin, None without a backend.
        inner_version: its version.
        versions: installed version of each package, None where it is missing.
        pairs: each pair of versions that is known to work, and whether it is installed.
        trial: whether a product computed on the chip was right; None if it was not tried.
        problems: what is wrong and how to mend it; empty when all is well.
    """

    bridge: str
    python: str
    chips: tuple[str, ...]
    backend: str | None
    reason: str
    inner_plugin: str | None
    inner_version: str | None
    versions: dict[str, str | None]
    pairs: tuple[tuple[str, bool], ...]
    trial: bool | None
    problems: tuple[Problem, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of doctor."""
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def run(args: argparse.Namespace, _unknown: Sequence[str]) -> int:
    """Print the report; 0 when nothing is wrong, else 1."""
    report = examine()
    print(json.dumps(dataclasses.asdict(report), indent=2) if args.json else text(report))
    return 1 if report.problems else 0


def examine() -> Report:
    """Look at everything; a thing that cannot be looked at becomes a problem of the report."""
    versions = {package: installed(package) for package in PACKAGES}
    problems = [*_install_problems(), *_version_problems(versions)]
    chosen, reason = None, ""
    try:
        wanted = settings.load()
        chosen = backend.resolve(wanted)
        reason = chosen.reason
        problems += _library_problems(wanted)
    except BridgeError as error:
        what, _, mend = str(error).partition(": ")
        reason = what
        problems.append(Problem(what, mend))
    tried = None
    if chosen and versions["torch"] and versions["torch_tpu"]:
        failure = try_chip()
        tried = failure is None
        if failure:
            problems.append(Problem("a product on the chip failed", failure))
    return Report(
        bridge=__version__,
        python=platform.python_version(),
        chips=tuple(describe(chip) for chip in (chosen.chips if chosen else chips.silicon())),
        backend=chosen.name if chosen else None,
        reason=reason,
        inner_plugin=str(chosen.inner_library) if chosen else None,
        inner_version=chosen.inner_version if chosen else None,
        versions=versions,
        pairs=tuple((_pair_name(pair), _pair_installed(pair, versions)) for pair in KNOWN_PAIRS),
        trial=tried,
        problems=tuple(problems),
    )


def installed(package: str) -> str | None:
    """The installed version of a package without its local part ("+cpu"), None where it is missing."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def try_chip() -> str | None:
    """Compute a product on the chip in a child process; None when it is right, else the last line of its errors."""
    environment = server.environment()
    try:
        trial = subprocess.run(
            [sys.executable, "-c", TRIAL], env=environment, capture_output=True, text=True, timeout=TRIAL_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {TRIAL_SECONDS} s"
    if trial.returncode == 0:
        return None
    lines = [line for line in trial.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"the child process ended with status {trial.returncode}"


def describe(chip: chips.Chip) -> str:
    """A chip as one line: where it is, its board, its memory."""
    place = "emulated" if chip.emulated else chip.device
    return f"{chip.index}: {chip.board}, {chip.memory / 2**30:.1f} GiB, {place}"


def _install_problems() -> list[Problem]:
    problems = []
    if sys.version_info[:2] not in PYTHONS:
        wanted = " or ".join(".".join(map(str, version)) for version in PYTHONS)
        problems.append(Problem(f"there is no torch_tpu for Python {platform.python_version()}", f"use Python {wanted}"))
    if not Path(sysconfig.get_path("purelib"), STARTER).is_file():
        problems.append(
            Problem(f"{STARTER} is not installed, so LIBTT_TPU_COMPAT has no effect", "run `pip install .` in the project")
        )
    return problems


def _library_problems(wanted: settings.Settings) -> list[Problem]:
    if wanted.tpu_library in (None, backend.PLUGIN):
        return []
    what = f"TPU_LIBRARY_PATH={wanted.tpu_library} is set: torch_tpu uses that plugin, not the bridge's"
    return [Problem(what, "unset TPU_LIBRARY_PATH")]


def _version_problems(versions: dict[str, str | None]) -> list[Problem]:
    missing = [Problem(f"{package} is not installed", MEND_INSTALL) for package, found in versions.items() if not found]
    untested = [
        Problem(f"{' with '.join(f'{package} {versions[package]}' for package in pair)} was never tested", MEND_INSTALL)
        for pair in KNOWN_PAIRS
        if all(versions[package] for package in pair) and not _pair_installed(pair, versions)
    ]
    return missing + untested


def _pair_installed(pair: dict[str, str], versions: dict[str, str | None]) -> bool:
    return all(versions[package] == version for package, version in pair.items())


def _pair_name(pair: dict[str, str]) -> str:
    return " with ".join(f"{package} {version}" for package, version in pair.items())


def text(report: Report) -> str:
    """The report as a person reads it."""
    lines = [
        f"tt-tpu-bridge {report.bridge}, Python {report.python}",
        f"chips: {len(report.chips)}",
        *(f"  {chip}" for chip in report.chips),
        f"backend: {report.backend or 'none'} ({report.reason})",
        f"inner plugin: {report.inner_plugin or 'none'} {report.inner_version or ''}".rstrip(),
        "versions:",
        *(f"  {package} {found or 'not installed'}" for package, found in report.versions.items()),
        "known to work together:",
        *(f"  {pair} ({'installed' if here else 'not installed'})" for pair, here in report.pairs),
        f"a product on the chip: {TRIAL_WORDS[report.trial]}",
        "nothing is wrong" if not report.problems else "wrong:",
        *(f"  {problem.what}\n    {problem.mend}" for problem in report.problems),
    ]
    return "\n".join(lines)
