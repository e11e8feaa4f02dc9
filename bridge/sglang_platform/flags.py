"""Server arguments: our two flags, what is refused, and what gets another default.

`--tpu-compile-bs` and `--tpu-compile-tokens` name the shapes that are compiled
before the server is ready. They travel in SGLang's own fields for decode and
prefill graph sizes, so that every spawned process sees them.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bridge import ports
from bridge.errors import BridgeError, CheckpointError, SettingsError
from bridge.sglang_platform import crash, precision, tensor_parallel

ATTENTION_BACKEND = SAMPLING_BACKEND = "tpu_oot"
PAGE_SIZES = (32, 64, 128)
DEFAULT_PAGE_SIZE = 64
TILE = 32
DEFAULT_BATCH_SIZES = (1, 4)
DEFAULT_TOKENS = (64,)
_KV_DTYPES = ("auto", "bf16", "bfloat16")
_ONE = ("pp_size", "ep_size", "attn_dp_size")
_UNSET = (
    "speculative_algorithm",
    "enable_lora",
    "lora_paths",
    "is_embedding",
    "quantization",
    "enable_hierarchical_cache",
    "enable_return_hidden_states",
    "return_hidden_states_mode",
    "dllm_algorithm",
    "enable_pdmux",
    "enable_dp_attention",
    "cpu_offload_gb",
)


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
        _check_port(arguments)
    except BridgeError as error:
        raise SystemExit(f"error: {error}") from error
    arguments.cuda_graph_bs_decode = arguments.tpu_compile_bs or arguments.cuda_graph_bs_decode
    arguments.cuda_graph_bs_prefill = arguments.tpu_compile_tokens or arguments.cuda_graph_bs_prefill
    return from_cli_args(cls, arguments)


def _check_port(arguments: argparse.Namespace) -> None:
    """SGLang looks whether it can listen when the model has been loaded, and does not end where it cannot."""
    host, port = getattr(arguments, "host", None), getattr(arguments, "port", None)
    if not host or not port:
        return
    error = ports.listening_error(host, port)
    if error is not None:
        raise SettingsError(f"cannot listen on port {port} of {host} ({error.strerror}): choose another --port")


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
    chunk, page = arguments.chunked_prefill_size, arguments.page_size or DEFAULT_PAGE_SIZE
    if chunk is not None and chunk > 0 and chunk % page:
        raise SettingsError(f"--chunked-prefill-size {chunk} is not a multiple of the page size, {page}")
    for tokens in getattr(arguments, "tpu_compile_tokens", None) or ():
        if tokens % TILE:
            raise SettingsError(f"--tpu-compile-tokens {tokens} is not a multiple of {TILE}, the height of the chip's tiles")
    given = {name: value for name in _UNSET if (value := getattr(arguments, name, None))}
    given |= {name: value for name in _ONE if (value := getattr(arguments, name, None)) not in (None, 1)}
    if (mode := getattr(arguments, "disaggregation_mode", None)) not in (None, "null"):
        given["disaggregation_mode"] = mode
    for name, value in given.items():
        flag = name.replace("_", "-")
        raise SettingsError(f"--{flag} {value} is not served on this chip by this version: leave the argument out")
    folder = Path(arguments.model_path)
    if str(arguments.model_path).startswith(("/", ".", "~")) and not folder.expanduser().exists():
        raise CheckpointError(f"there is no model folder {folder}: --model-path wants a Hugging Face model folder or name")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json: --model-path wants a Hugging Face model folder or name")
    layout = tensor_parallel.Layout.of(arguments)
    if layout.hosts > 1 and not getattr(arguments, "dist_init_addr", None):
        raise SettingsError(f"--nnodes {layout.hosts} needs --dist-init-addr HOST:PORT, the first machine's on all of them")
    tensor_parallel.check(layout, folder / "config.json")


def buckets(server_args: Any, config: Any) -> tuple[list[int], list[int]]:
    """Decode and prefill sizes to compile, ascending.

    Args:
        server_args: knows which parts of `config` were asked for; SGLang fills the rest with sizes by the dozen.
        config: SGLang's CudaGraphConfig.
    """
    asked = getattr(server_args, "_cuda_graph_config_locked", ())
    decode = config.decode.bs if ("decode", "bs") in asked else DEFAULT_BATCH_SIZES
    prefill = config.prefill.bs if ("prefill", "bs") in asked else DEFAULT_TOKENS
    return sorted(set(decode)), sorted({-(-tokens // TILE) * TILE for tokens in prefill})


def apply_defaults(server_args: Any) -> None:
    """Set what the user left open, and what has one possible value on this chip."""
    server_args.page_size = server_args.page_size or DEFAULT_PAGE_SIZE
    server_args.attention_backend = ATTENTION_BACKEND
    server_args.sampling_backend = SAMPLING_BACKEND
    precision.keep_logits_wide(server_args)
    tensor_parallel.prepare(server_args)
    crash.prepare()
    # Else an idle scheduler takes half a core from everything else on the machine.
    server_args.sleep_on_idle = True
    # A step's token ids are made on the host, so there is nothing to run ahead of.
    server_args.disable_overlap_schedule = True
    server_args.disable_custom_all_reduce = True
