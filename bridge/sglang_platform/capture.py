"""Where SGLang would capture CUDA graphs, the programs are compiled."""

from typing import Any

from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import CudaGraphsCapture, GraphCapture
from sglang.srt.runtime_context import get_exec

from bridge import host_memory
from bridge.sglang_platform import flags
from bridge.sglang_platform.runner import ProgramRunner


def compile_programs(*, model_runner: Any, **_arguments: Any) -> CudaGraphsCapture:
    """REPLACE capture_cuda_graphs: one runner for decode, prefill and everything else."""
    runner = ProgramRunner(model_runner, *flags.buckets(model_runner.server_args, get_exec().graph.cuda_graph_config))
    host_memory.give_back()

    def capture(phase: str) -> GraphCapture:
        return GraphCapture(runner=runner, memory_phase=phase, memory_usage_gb=0, capture_time=runner.warm_up_seconds)

    return CudaGraphsCapture(eager_runner=runner, prefill=capture("prefill"), decode=capture("decode"))
