"""Whether a model and its KV cache fit the chip, said before they are moved there."""

from collections.abc import Callable
from typing import Any

import torch

from bridge.errors import BackendError
from bridge.sglang_platform.device_module import memory_info

_MORE = "divide the model over more chips (--tp-size), or give an emulated chip more (TT_TPU_EMULATED_MEMORY)"


def _size(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"


def require_weights(model: torch.nn.Module) -> None:
    """Raise BackendError where the chip has no room for a model that is still on the host."""
    tensors = {*model.parameters(), *model.buffers()}
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    free, total = memory_info()
    if needed > free:
        room = f"where {_size(free)} of {_size(total)} are free"
        raise BackendError(f"the model's weights need {_size(needed)} on each chip, {room}: {_MORE}")


def require_cache(profile: Callable, configurator: Any, *args: Any, **kwargs: Any) -> int:
    """AROUND what SGLang finds free for the KV cache, in bytes: BackendError where that is nothing."""
    try:
        return profile(configurator, *args, **kwargs)
    except ValueError:
        raise _no_cache() from None


def require_token(config: Any) -> None:
    """REPLACE MemoryPoolConfig.__post_init__: BackendError where there is room for no token."""
    if config.max_total_num_tokens <= 0:
        raise _no_cache()


def _no_cache() -> BackendError:
    from sglang.srt.runtime_context import get_schedule

    fraction, (free, total) = get_schedule().mem_fraction_static, memory_info()
    return BackendError(
        f"there is no room for a KV cache: {_size(free)} of the chip's {_size(total)} are free beside the weights, and "
        f"--mem-fraction-static {fraction} keeps {_size(int(total * (1 - fraction)))} for programs: raise it, {_MORE}"
    )
