"""Serve a model: SGLang on the chips, with defaults that fit them.

Every option that this command does not know goes to sglang.launch_server as it
is, and wins over a default of ours. The command ends with the server: SIGTERM
and SIGINT end it, and the exit status is the server's.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence

from bridge import backend, settings
from bridge.errors import LaunchError
from launch import model, server
from launch.signals import Stopped, watch

CONTEXT = 2048
DEFAULTS = (
    ("--dtype", "bfloat16"),
    ("--mem-fraction-static", "0.75"),
    ("--max-total-tokens", "16384"),
    ("--enable-torch-compile",),
    ("--page-size", "64"),
    ("--chunked-prefill-size", "64"),
    ("--torch-compile-max-bs", "4"),
    ("--tpu-compile-bs", "1", "4"),
    ("--tpu-compile-tokens", "64"),
    ("--grammar-backend", "none"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that are not SGLang's."""
    parser.add_argument("model", metavar="MODEL", help="a folder in Hugging Face's layout, or a name on a model hub")
    parser.add_argument(
        "--chips",
        type=int,
        metavar="N",
        help="use N chips: divide the model over them, or over the part of each replica of SGLang's --dp-size (default 1)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=_port, default=31000, help="port to listen on (default %(default)s)")
    parser.add_argument(
        "--ready-seconds", type=float, default=1800, metavar="S", help="give up when not ready by then (default 1800)"
    )
    parser.epilog = "Every other option is passed on to sglang.launch_server."


def _port(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: use 1 to 65535")
    return int(text)


def chips_a_replica(chips: int | None, given: Sequence[str]) -> int:
    """Over how many chips each replica of the model is divided.

    Args:
        chips: of all replicas together; None where the user has left it to SGLang's options.
        given: the user's options for SGLang.

    Raises:
        LaunchError: `chips` is not what the replicas take, or cannot be divided among them.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dp-size", "--data-parallel-size", type=int, default=1)
    parser.add_argument("--tp-size", "--tensor-parallel-size", type=int)
    asked, _ = parser.parse_known_args(given)
    if chips is None:
        return asked.tp_size or 1
    if asked.tp_size is not None and asked.dp_size * asked.tp_size != chips:
        raise LaunchError(
            f"--chips {chips} with --dp-size {asked.dp_size} and --tp-size {asked.tp_size}: those take "
            f"{asked.dp_size * asked.tp_size}; leave --chips or --tp-size out"
        )
    if chips < 1 or asked.dp_size < 1 or chips % asked.dp_size:
        raise LaunchError(f"--chips {chips} cannot be divided among --dp-size {asked.dp_size} replicas: use a multiple of it")
    return chips // asked.dp_size


def options(context: int | None, given: Sequence[str], chips: int = 1) -> list[str]:
    """SGLang's options: each default that `given` does not name, then `given`.

    Args:
        context: positions that the model was made for, None if unknown.
        given: the user's options for SGLang.
        chips: over how many each replica of the model is divided.
    """
    defaults = [*DEFAULTS, ("--tp-size", str(chips)), ("--context-length", str(min(CONTEXT, context or CONTEXT)))]
    named = {option.partition("=")[0] for option in given}
    return [word for default in defaults if default[0] not in named for word in default] + list(given)


def run(args: argparse.Namespace, passed_on: Sequence[str]) -> int:
    """Serve until the server ends; returns its exit status, raises BridgeError where it cannot start."""
    found = model.find(args.model)
    address = server.Address(args.host, args.port)
    chosen = backend.resolve(settings.load())
    if not address.free():
        raise LaunchError(f"port {args.port} of {args.host} is in use: end what listens there, or choose another --port")
    size = chips_a_replica(args.chips, passed_on)
    arguments = server.command(found.path, address, options(found.context, passed_on, size))
    _say(f"backend {chosen.name}: {chosen.reason}")
    _say(shlex.join(arguments))
    process = server.start(arguments)
    try:
        watch()
        seconds = server.wait_ready(process, address, args.ready_seconds)
        _say(f"ready at {address} after {seconds:.0f} s")
        process.wait()
    except Stopped:
        pass
    except LaunchError:
        if (process.poll() or 0) <= 0:
            raise
        # Else it has said itself why it ended, in the last line.
    finally:
        status = server.stop(process)
    return status if status >= 0 else 128 - status


def _say(text: str) -> None:
    print(f"tt-tpu serve: {text}", file=sys.stderr, flush=True)
