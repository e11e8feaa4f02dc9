"""The hooks that SGLang applies in each of its processes (entry point sglang.srt.plugins)."""

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from bridge.sglang_platform import capture, flags, host_tensors, requests, shutdown, weights

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_COMPONENTS = "sglang.srt.model_executor.model_runner_components"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_WORKER = "sglang.srt.managers.tp_worker.TpModelWorker"


def register() -> None:
    """Register every hook; does nothing where the platform is not this one."""
    from sglang.srt.platforms import current_platform

    from bridge.sglang_platform.platform import ATTENTION_BACKEND, TpuPlatform

    if not isinstance(current_platform, TpuPlatform):
        return
    from sglang.srt.arg_groups.choices import add_attention_backend_choices

    add_attention_backend_choices([ATTENTION_BACKEND])
    for target, hook, kind in (
        (f"{_SERVER_ARGS}.add_cli_args", flags.add_flags, HookType.AFTER),
        (f"{_SERVER_ARGS}.from_cli_args", flags.read_flags, HookType.AROUND),
        (f"{_COMPONENTS}.load_model_utils.load_model_with_memory_saver", weights.load_on_host, HookType.AROUND),
        (f"{_CONFIGURATOR}._init_pools", host_tensors.build_pools, HookType.AROUND),
        (f"{_WORKER}.alloc_memory_pool", host_tensors.schedule_on_host, HookType.AFTER),
        (f"{_TOKENIZER}._validate_one_request", requests.refuse, HookType.BEFORE),
        (f"{_TOKENIZER}.sigterm_watchdog", shutdown.stop_soon, HookType.AROUND),
        (f"{_COMPONENTS}.cuda_graph_setup.capture_cuda_graphs", capture.compile_programs, HookType.REPLACE),
    ):
        HookRegistry.register(target, hook, kind)
