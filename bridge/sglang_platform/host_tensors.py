"""Keeps everything that the scheduler computes on the host.

SGLang puts request slots, page allocation, sequence lengths and sampling on the
device of the model. Here each of those small, ever differing shapes would be a
program of its own on the chip, so once the weights are loaded the runner and the
scheduler are told that their device is the host. Only compiled programs see the
chip, and their logits come back to be sampled.
"""

from collections.abc import Callable
from typing import Any

HOST = "cpu"


def build_pools(init_pools: Callable, configurator: Any, **arguments: Any) -> Any:
    """AROUND KVCacheConfigurator._init_pools: request slots and page allocator on the host.

    The pool of pages itself puts its storage on the chip, see kv_pool. Sizes have
    been derived from the chip's memory by now.
    """
    device, configurator.device = configurator.device, HOST
    try:
        return init_pools(configurator, **arguments)
    finally:
        configurator.device = device


def schedule_on_host(_result: None, worker: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER TpModelWorker.alloc_memory_pool: batches are made of host tensors from here on."""
    worker.device = worker.model_runner.device = HOST
