"""The KV cache: one tensor of pages for the keys and one for the values of each layer.

A page holds `page_size` positions of all KV heads, heads outermost, as TTNN's
paged attention wants it: [pages, kv_heads, page_size, head_dim]. Page 0 belongs
to nobody: padding is written there. A program takes the tensors, which are
donated to it, and hands back the ones that replace them.
"""

from collections.abc import Sequence

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from bridge.sglang_platform.device_module import DEVICE


class PagedKVPool(MHATokenToKVPool):
    """SGLang's multi-head pool with its storage on the chip, in whole pages."""

    def _create_buffers(self) -> None:
        self.num_pages = self.size // self.page_size + 1
        self.k_buffer = self._zeros_of_layers(self.head_dim)
        self.v_buffer = self._zeros_of_layers(self.v_head_dim)

    def _zeros_of_layers(self, head_dim: int) -> list[torch.Tensor]:
        # From the host: what comes from there lies in large pages of an emulated chip's memory, and stays there.
        shape = (self.num_pages, self.head_num, self.page_size, head_dim)
        zeros = torch.zeros(shape, dtype=self.store_dtype, device="cpu")
        return [zeros.to(DEVICE) for _ in range(self.layer_num)]

    @property
    def caches(self) -> list[torch.Tensor]:
        """Keys and values of every layer, in turn: k0, v0, k1, v1, …"""
        return [cache for layer in zip(self.k_buffer, self.v_buffer, strict=True) for cache in layer]

    def replace(self, caches: Sequence[torch.Tensor]) -> None:
        """Take what a program handed back for `caches`."""
        self.k_buffer = list(caches[0::2])
        self.v_buffer = list(caches[1::2])
