"""Server arguments: our two flags, what is refused, and what gets another default.

`--tpu-compile-bs` and `--tpu-compile-tokens` name the shapes that are compiled
before the server is ready. They travel in SGLang's own fields for decode and
prefill graph sizes, so that every spawned process sees them.
"""

import argparse
from collections.abc import Callable
from typing import Any

from bridge.errors import SettingsError

PAGE_SIZES = (32, 64, 128)
DEFAULT_BATCH_SIZES = (1, 4)
DEFAULT_TOKENS = (64,)


def add_flags(_result: None, parser: argparse.ArgumentParser) -> None:
    """AFTER ServerArgs.add_cli_args."""
    parser.add_argument(
        "--tpu-compile-bs",
        type=_positive,
        nargs="+",
        metavar="N",
        help="Numbers of requests for which a decode program is compiled before the server is ready.",
    )
    parser.add_argument(
        "--tpu-compile-tokens",
        type=_positive,
        nargs="+",
        metavar="N",
        help="Numbers of prompt tokens for which a prefill program is compiled before the server is ready.",
    )


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def read_flags(from_cli_args: Callable, cls: type, arguments: argparse.Namespace) -> Any:
    """AROUND ServerArgs.from_cli_args: the two flags into SGLang's own fields."""
    if arguments.tpu_compile_bs:
        arguments.cuda_graph_bs_decode = sorted(set(arguments.tpu_compile_bs))
    if arguments.tpu_compile_tokens:
        arguments.cuda_graph_bs_prefill = sorted(set(arguments.tpu_compile_tokens))
    return from_cli_args(cls, arguments)


def check(server_args: Any) -> None:
    """Refuse what the chip cannot do; raises SettingsError."""
    if server_args.page_size not in (None, *PAGE_SIZES):
        raise SettingsError(
            f"--page-size {server_args.page_size} is not possible on this chip: use one of "
            f"{', '.join(map(str, PAGE_SIZES))}"
        )


def apply_defaults(server_args: Any) -> None:
    """Set what the user left open, and what has one possible value on this chip."""
    server_args.page_size = server_args.page_size or 64
    server_args.attention_backend = "tpu_oot"
    server_args.sampling_backend = "pytorch"
    # A step's token ids are made on the host, so there is nothing to run ahead of.
    server_args.disable_overlap_schedule = True
    server_args.disable_custom_all_reduce = True
