"""The hooks that SGLang applies in each of its processes (entry point sglang.srt.plugins)."""

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from bridge.errors import BridgeError
from bridge.sglang_platform import capture, crash, flags, host_tensors, memory, requests, sampler, shutdown, statistics, tensor_parallel, weights
from bridge.sglang_platform.device_module import DEVICE
from kernels_replacements.import_hooks import when_imported

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_COMPONENTS = "sglang.srt.model_executor.model_runner_components"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_CONTROLLER = "sglang.srt.managers.data_parallel_controller.DataParallelController"
_ENGINE = "sglang.srt.entrypoints.engine"
_GENERATE = "sglang.srt.managers.io_struct.GenerateReqInput"
_GROUP = "sglang.srt.distributed.parallel_state.GroupCoordinator"
_HTTP_SERVER = "sglang.srt.entrypoints.http_server"
_POOL = "sglang.srt.model_executor.pool_configurator.MemoryPoolConfig"
_PORTS = "sglang.srt.server_args.PortArgs"
_SAMPLING_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_SCHEDULER = "sglang.srt.managers.scheduler"
_STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_WORKER = "sglang.srt.managers.tp_worker.TpModelWorker"


HOOKS = (
    (f"{_SERVER_ARGS}.add_cli_args", flags.add_flags, HookType.AFTER),
    (f"{_SERVER_ARGS}.from_cli_args", flags.read_flags, HookType.AROUND),
    (f"{_COMPONENTS}.load_model_utils.load_model_with_memory_saver", weights.load_on_host, HookType.AROUND),
    (f"{_CONFIGURATOR}._profile_available_bytes", memory.require_cache, HookType.AROUND),
    (f"{_CONFIGURATOR}._init_pools", host_tensors.build_pools, HookType.AROUND),
    (f"{_WORKER}.alloc_memory_pool", host_tensors.schedule_on_host, HookType.AFTER),
    (f"{_SAMPLING_INFO}.from_schedule_batch", sampler.seed_requests, HookType.AFTER),
    (f"{_GENERATE}._handle_parallel_sampling", requests.refuse_uneven, HookType.BEFORE),
    (f"{_TOKENIZER}._validate_one_request", requests.refuse, HookType.BEFORE),
    *(
        (f"{_TOKENIZER}.{verb}_expert_distribution_record", requests.refuse_expert_records, HookType.BEFORE)
        for verb in ("start", "stop", "dump")
    ),
    (f"{_TOKENIZER}.sigterm_watchdog", shutdown.stop_soon, HookType.AROUND),
    (f"{_PORTS}.init_new", crash.note_files, HookType.AFTER),
    ("sglang.srt.utils.numa_utils.configure_subprocess", crash.watch_scheduler, HookType.AROUND),
    (f"{_ENGINE}.Engine._launch_detokenizer_subprocesses", crash.watch_detokenizers, HookType.AFTER),
    (f"{_ENGINE}._wait_for_scheduler_ready", crash.wait_ready, HookType.AROUND),
    (f"{_ENGINE}.launch_dummy_health_check_server", crash.stop_when_told, HookType.BEFORE),
    ("sglang.srt.utils.common.kill_process_tree", crash.kill_process_tree, HookType.AROUND),
    (f"{_CONTROLLER}.launch_dp_schedulers", crash.pass_on, HookType.BEFORE),
    (f"{_CONTROLLER}.event_loop", tensor_parallel.sleep_while_idle, HookType.BEFORE),
    (f"{_SCHEDULER}.Scheduler.__init__", crash.note_failure, HookType.AROUND),
    (f"{_SCHEDULER}.Scheduler.run_event_loop", crash.note_failure, HookType.AROUND),
    (f"{_SCHEDULER}.Scheduler.handle_shutdown", crash.expect_the_end, HookType.BEFORE),
    (f"{_SCHEDULER}.configure_scheduler_process", crash.enter_scheduler, HookType.BEFORE),
    (f"{_SCHEDULER}.configure_scheduler_process", tensor_parallel.join_mesh, HookType.BEFORE),
    (f"{_POOL}.__post_init__", memory.require_token, HookType.REPLACE),
    (f"{_GROUP}.all_reduce", tensor_parallel.all_reduce, HookType.AROUND),
    (f"{_GROUP}.all_gather", tensor_parallel.all_gather, HookType.AROUND),
    (f"{_STATE}.get_internal_state", statistics.add_counts, HookType.AFTER),
    (f"{_COMPONENTS}.cuda_graph_setup.capture_cuda_graphs", capture.compile_programs, HookType.REPLACE),
)


def register() -> None:
    """Register every hook; does nothing where the platform is not this one."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.platforms import current_platform

    if current_platform.device_name != DEVICE or not current_platform.is_out_of_tree():
        return
    add_attention_backend_choices([flags.ATTENTION_BACKEND])
    for target, hook, kind in HOOKS:
        HookRegistry.register(target, hook, kind)
    when_imported(_HTTP_SERVER, requests.want_json_objects)


def require_hooks() -> None:
    """Raise BridgeError where a hook is not in place: SGLang logs a hook that fails, and goes on."""
    missing = [target for target, _, _ in HOOKS if target not in HookRegistry._patched]
    if missing:
        raise BridgeError(
            f"SGLang has no place for the hooks on {', '.join(missing)}: the platform tpu_oot is written for "
            "sglang 0.5.23, and the log above says what is different"
        )
