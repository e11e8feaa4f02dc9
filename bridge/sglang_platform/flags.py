"""Server arguments: our two flags, what is refused, and what gets another default.

`--tpu-compile-bs` and `--tpu-compile-tokens` name the shapes that are compiled
before the server is ready. They travel in SGLang's own fields for decode and
prefill graph sizes, so that every spawned process sees them.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError, CheckpointError, SettingsError

ATTENTION_BACKEND = SAMPLING_BACKEND = "tpu_oot"
PAGE_SIZES = (32, 64, 128)
DEFAULT_BATCH_SIZES = (1, 4)
DEFAULT_TOKENS = (64,)
_KV_DTYPES = ("auto", "bf16", "bfloat16")
# Arguments with the one value that this version serves.
_ONLY = {
    "tp_size": 1,
    "dp_size": 1,
    "pp_size": 1,
    "speculative_algorithm": None,
    "enable_lora": None,
    "is_embedding": False,
    "quantization": None,
    "enable_hierarchical_cache": False,
    "disaggregation_mode": "null",
}


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
    """AROUND ServerArgs.from_cli_args: the two flags into SGLang's own fields.

    A command line that cannot be served ends here with one message.
    """
    try:
        check(arguments)
    except BridgeError as error:
        raise SystemExit(f"error: {error}") from error
    decode = arguments.tpu_compile_bs or arguments.cuda_graph_bs_decode or DEFAULT_BATCH_SIZES
    prefill = arguments.tpu_compile_tokens or arguments.cuda_graph_bs_prefill or DEFAULT_TOKENS
    arguments.cuda_graph_bs_decode = sorted(set(decode))
    arguments.cuda_graph_bs_prefill = sorted(set(prefill))
    return from_cli_args(cls, arguments)


def check(arguments: Any) -> None:
    """Refuse what cannot be served; raises SettingsError or CheckpointError.

    Args:
        arguments: SGLang's ServerArgs, or the parsed command line with the same names.
    """
    if arguments.page_size not in (None, *PAGE_SIZES):
        raise SettingsError(
            f"--page-size {arguments.page_size} is not possible on this chip: use one of {', '.join(map(str, PAGE_SIZES))}"
        )
    if arguments.kv_cache_dtype not in _KV_DTYPES:
        raise SettingsError(
            f"--kv-cache-dtype {arguments.kv_cache_dtype} is not possible on this chip: use one of {', '.join(_KV_DTYPES)}"
        )
    for name, value in _ONLY.items():
        given = getattr(arguments, name, value)
        if given != value and given:
            flag = name.replace("_", "-")
            raise SettingsError(f"--{flag} {given} is not served on this chip by this version: leave the argument out")
    folder = Path(arguments.model_path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json: --model-path wants a Hugging Face model folder or name")


def apply_defaults(server_args: Any) -> None:
    """Set what the user left open, and what has one possible value on this chip."""
    server_args.page_size = server_args.page_size or 64
    server_args.attention_backend = ATTENTION_BACKEND
    server_args.sampling_backend = SAMPLING_BACKEND
    # A step's token ids are made on the host, so there is nothing to run ahead of.
    server_args.disable_overlap_schedule = True
    server_args.disable_custom_all_reduce = True
