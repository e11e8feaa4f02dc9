"""The platform class that SGLang asks what this device is and which parts serve it.

Settings that the chip cannot honour are set here with a reason; a request for
something that it cannot do is an error before any weight is read.
"""

from typing import Any

import torch
from sglang.srt.platforms.interface import PlatformCapabilities, PlatformEnum, SRTPlatform

from bridge.sglang_platform import device_module, flags


class TpuPlatform(SRTPlatform):
    """A Tenstorrent chip, or an emulated one, presented as a TPU."""

    _enum = PlatformEnum.OOT
    device_name = device_module.DEVICE
    device_type = device_module.DEVICE
    capabilities = PlatformCapabilities(graph_capture=True)

    def __init__(self) -> None:
        device_module.install()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        from bridge.sglang_platform import plugin

        plugin.require_hooks()
        flags.check(server_args)
        flags.apply_defaults(server_args)

    def get_default_attention_backend(self) -> str:
        return flags.ATTENTION_BACKEND

    def get_device(self, device_id: int = 0) -> str:
        return f"{device_module.DEVICE}:{device_id}"

    def get_device_name(self, device_id: int = 0) -> str:
        return torch.get_device_module(device_module.DEVICE).get_device_name(device_id)

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return device_module.memory_info()[1]

    def get_current_memory_usage(self, device: torch.device | None = None) -> int:
        free, total = device_module.memory_info()
        return total - free

    def get_torch_distributed_backend_str(self) -> str:
        from bridge.sglang_platform import tensor_parallel

        return tensor_parallel.distributed_backend()

    def get_torch_profiler_activity_str(self) -> str:
        return "TPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        # torch's profiler sees the host's side of a program; the chip's own is libtt's to tell.
        return torch.profiler.ProfilerActivity.CPU

    def get_compile_backend(self, mode: str | None = None) -> str:
        # For what SGLang compiles beside the model: small sums over host tensors, not worth a C++ compiler's time.
        return "eager"

    def init_backend(self) -> None:
        # In every process that builds a model; both register themselves.
        from bridge.sglang_platform import attention, sampler  # noqa: F401

    def post_load_model(self, model: torch.nn.Module) -> None:
        from bridge.sglang_platform import memory, precision, weights

        memory.require_weights(model)
        weights.move_to_chip(model)
        precision.keep_residual_wide(model)

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        from bridge.sglang_platform.kv_pool import PagedKVPool

        return PagedKVPool if kind == "mha" else None
