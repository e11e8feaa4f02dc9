"""What torch_tpu must be told about the chips, since it looks for Google's PCI devices.

`torch_tpu._internal.utils.hardware` is changed right after it is imported and
before anybody has taken a function out of it; flash attention and messages between
ranks are replaced once torch_tpu has registered its own.
"""

from types import ModuleType

from bridge import messages
from bridge.backend import Backend
from kernels_replacements import flash_attention
from kernels_replacements.import_hooks import provide, when_imported

# The name of the presented kind ("TPU v5 lite") in torch_tpu's own table of generations.
_GENERATION = "TPU v5e"


def install(backend: Backend) -> None:
    """Leave the hooks; nothing is imported now."""
    when_imported("torch_tpu._internal.utils.hardware", lambda module: _describe(module, backend))
    when_imported("torch_tpu", flash_attention.install)
    when_imported("torch_tpu", messages.install)
    # torch_tpu asks libtpu for a library path; ours is set, and 500 MB of libtpu are not needed.
    provide("libtpu", _fill_libtpu)


def _fill_libtpu(module: ModuleType) -> None:
    module.__doc__ = "Stands in for libtpu, whose library is not used."
    module.configure_library_path = lambda: None


def _describe(hardware: ModuleType, backend: Backend) -> None:
    """Answer torch_tpu's questions about the hardware from what was found."""
    count, memory = len(backend.chips), backend.chips[0].memory

    def topology(world_size: int | None = None) -> str:
        return f"1,{world_size or count},1"

    hardware.get_tpu_device_count = lambda: count
    hardware.get_tpu_device_name = lambda: _GENERATION
    hardware.get_tpu_version = lambda: hardware.TpuVersion.V5E
    hardware.get_tpu_topology = topology
    hardware.get_devices_per_chip = lambda: 1
    hardware.get_hbm_bytes_per_chip = hardware.get_hbm_bytes_per_device = lambda: memory
    # A TPU's peak would make a false utilisation figure.
    hardware.get_bf16_flops_per_chip = hardware.get_bf16_flops_per_device = lambda: None
