"""Compiles StableHLO programs on the real libtt, for a chip that is only described (mock mode).

    python compile_on_libtt.py LIBTT.so PROGRAMS.json RESULTS.json [CHIPS]

PROGRAMS.json maps names to programs as text, RESULTS.json each name to "" or to the
compiler's error; CHIPS run a program together. libtt's own log fills the standard output. A process of its own, since libtt brings up
its cluster once a process, and ends the process on some bad input.
"""

import json
import sys
from pathlib import Path

import pypjrt


def main(library: str, programs: str, answers: str, chips: str = "1") -> None:
    count = int(chips)
    options = pypjrt.CompileOptions(
        num_partitions=count, use_spmd_partitioning=count > 1, use_shardy_partitioner=count > 1
    )
    client = pypjrt.Client.create(pypjrt.Plugin(library))
    results = {}
    for name, program in json.loads(Path(programs).read_text()).items():
        try:
            client.compile(program, options=options).close()
            results[name] = ""
        except pypjrt.errors.PjrtError as error:
            results[name] = str(error)
    Path(answers).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
