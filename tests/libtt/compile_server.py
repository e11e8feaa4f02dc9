"""Compiles the server's own programs, traced from SGLang's model code, for a chip that is only described.

    python compile_server.py MODEL RESULTS.json KIND:SIZE ...

MODEL is a folder with a config.json; weights are never read, for a program needs their shapes only.
RESULTS.json maps each program to "" or to the compiler's error. Run with LIBTT_TPU_COMPAT=1,
TT_TPU_BACKEND=libtt and the mock cluster's variables. As a rank of several, on emulated chips, it maps each
program to its StableHLO: in mock mode libtt's processes do not join a mesh.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

PAGES, PAGE_SIZE, CONTEXT = 33, 64, 2048


def keep_stablehlo() -> None:
    """Let torch_tpu's compiled programs know their StableHLO."""
    from torch_tpu._internal.compile import compiler

    class Debugging(compiler.StaticCompiler):
        def __init__(self, *args, **options):
            super().__init__(*args, debug=True, **options)

    compiler.StaticCompiler = Debugging


def main(folder: str, results: str, *shapes: str) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    from bridge.sglang_platform import tensor_parallel

    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    arguments = ServerArgs(
        model_path=folder, tp_size=size, device="tpu", dtype="bfloat16", page_size=PAGE_SIZE, skip_tokenizer_init=True,
        context_length=CONTEXT,
    )  # fmt: skip
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    backend, meeting = tensor_parallel.distributed_backend(), "env://" if size > 1 else "tcp://127.0.0.1:0"
    init_distributed_environment(size, rank, meeting, rank, backend)
    initialize_model_parallel(backend)
    if size > 1:
        keep_stablehlo()
    from sglang.srt.models.llama import LlamaForCausalLM

    from bridge.sglang_platform import precision
    from bridge.sglang_platform.attention import PagedAttention
    from bridge.sglang_platform.kv_pool import PagedKVPool
    from bridge.sglang_platform.programs import ModelPrograms, Shape

    config = ModelConfig.from_server_args(arguments).hf_config
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    precision.keep_residual_wide(model)
    pool = object.__new__(PagedKVPool)
    pool.start_layer = 0
    shape = (PAGES, config.num_key_value_heads // size, PAGE_SIZE, config.hidden_size // config.num_attention_heads)
    pool.k_buffer, pool.v_buffer = (
        [torch.empty(shape, device="meta") for _ in range(config.num_hidden_layers)] for _ in range(2)
    )
    attention = PagedAttention(SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=None))
    programs = ModelPrograms(model, attention, CONTEXT // PAGE_SIZE)
    answers = {}
    for name in shapes:
        kind, bucket = name.split(":")
        try:
            program = programs.compile(Shape(kind, int(bucket)))
            program.resolve()
            answers[name] = program.mlir_text if size > 1 else ""
        except RuntimeError as error:
            answers[name] = str(error)
    Path(results).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
