"""The command `tt-tpu`: one module a command, which adds its arguments and runs.

An error that this project raises on purpose is printed as one message, without
a traceback, and the exit status is 1; wrong usage is 2, as argparse has it.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from bridge import __version__
from bridge.errors import BridgeError
from launch import doctor, kernels, reset, run, serve

COMMANDS = {"doctor": doctor, "kernels": kernels, "reset": reset, "run": run, "serve": serve}


def parser() -> argparse.ArgumentParser:
    """The arguments of every command; `args.command` names the one that was asked for."""
    top = argparse.ArgumentParser(prog="tt-tpu", description=__doc__.splitlines()[0], allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"tt-tpu-bridge {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = module.__doc__.splitlines()[0]
        module.add_arguments(commands.add_parser(name, help=summary, description=summary, allow_abbrev=False))
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    top = parser()
    args, unknown = top.parse_known_args(arguments)
    if unknown and args.command != "serve":
        top.error(f"unknown arguments: {' '.join(unknown)}")
    try:
        status = COMMANDS[args.command].run(args, unknown)
        sys.stdout.flush()
        return status
    except BridgeError as error:
        print(f"tt-tpu {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` for one, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
