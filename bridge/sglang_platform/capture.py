"""Where SGLang would capture CUDA graphs, the programs are compiled."""

from typing import Any

from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import CudaGraphsCapture, GraphCapture
from sglang.srt.runtime_context import get_exec

from bridge.sglang_platform import flags
from bridge.sglang_platform.runner import ProgramRunner


def compile_programs(*, model_runner: Any, **_arguments: Any) -> CudaGraphsCapture:
    """REPLACE capture_cuda_graphs: one runner for decode, prefill and everything else."""
    config = get_exec().graph.cuda_graph_config
    runner = ProgramRunner(
        model_runner,
        decode_sizes=config.decode.bs or list(flags.DEFAULT_BATCH_SIZES),
        prefill_sizes=config.prefill.bs or list(flags.DEFAULT_TOKENS),
    )

    def capture(phase: str) -> GraphCapture:
        return GraphCapture(runner=runner, memory_phase=phase, memory_usage_gb=0, capture_time=runner.warm_up_seconds)

    return CudaGraphsCapture(eager_runner=runner, prefill=capture("prefill"), decode=capture("decode"))
