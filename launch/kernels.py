"""List every known Pallas kernel and what stands in for it: `tt.*` calls, plain JAX, or its interpretation.

Nothing is imported for it but the table itself; installed versions are read from the
packages' metadata. What a process really used is in its log when it ends.
"""

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence

from kernels_replacements.originals import Known, known
from launch.doctor import installed

HOW = {"calls": "replaced by", "composed": "composed of plain JAX", "interpreted": "interpreted"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of kernels."""
    parser.add_argument("--json", action="store_true", help="print the table as one JSON list")


def run(args: argparse.Namespace, _unknown: Sequence[str]) -> int:
    """Print the table; always 0."""
    rows = known()
    versions = {package: installed(package) for package in {row.package for row in rows}}
    if args.json:
        print(json.dumps([dataclasses.asdict(row) | {"installed": versions[row.package]} for row in rows], indent=2))
    else:
        print(text(rows, versions))
    return 0


def text(rows: Sequence[Known], versions: dict[str, str | None]) -> str:
    """The table, a package after the other, and how many of each kind there are."""
    lines = []
    for package in sorted(versions):
        own = [row for row in rows if row.package == package]
        checked = f"checked with {own[0].version}" if own[0].version else "no version was checked"
        lines.append(f"{package}: {checked}, {versions[package] or 'not'} installed")
        width = max(len(row.original) for row in own)
        lines += [f"  {row.original:{width}}  {describe(row)}" for row in own]
    counts = Counter(row.how for row in rows)
    return "\n".join([*lines, "", ", ".join(f"{count} {how}" for how, count in sorted(counts.items()))])


def describe(row: Known) -> str:
    """What becomes of an original, in words."""
    return " ".join((HOW[row.how], ", ".join(row.calls))).rstrip()
