"""SGLang's attention backend: what a model's attention layers reach while a program is traced."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from bridge.errors import CompileError
from bridge.sglang_platform.flags import ATTENTION_BACKEND
from bridge.sglang_platform.kv_pool import PagedKVPool
from bridge.sglang_platform.pages import write_chunk
from kernels_replacements import tt_ops


@dataclass
class Step:
    """What a program that is being traced knows of the KV cache.

    Attributes:
        caches: k0, v0, k1, v1, …; a layer that writes puts the new one in place.
        page_table: [requests, table_width] int64.
        positions: [requests] int64 in a decode program, else None.
        start, length: [] int64 in a prefill program, else None.
    """

    caches: list[torch.Tensor]
    page_table: torch.Tensor
    positions: torch.Tensor | None = None
    start: torch.Tensor | None = None
    length: torch.Tensor | None = None


def _refuse(layer: RadixAttention, arguments: dict[str, Any]) -> None:
    wanted = {
        "a logit cap": layer.logit_cap > 0,
        "cross attention": layer.is_cross_attention,
        "attention that is not causal": layer.attn_type != AttentionType.DECODER,
        ", ".join(arguments): bool(arguments),
    }
    refused = [name for name, present in wanted.items() if present]
    if refused:
        raise CompileError(
            f"layer {layer.layer_id} asks for {' and '.join(refused)}, which the attention of the platform tpu_oot "
            "does not have: serve another model"
        )


class PagedAttention(AttentionBackend):
    """SGLang's attention backend; it only ever runs while a program is traced."""

    def __init__(self, model_runner: Any):
        super().__init__()
        if not isinstance(model_runner.token_to_kv_pool, PagedKVPool):
            raise CompileError(
                f"this model keeps a {type(model_runner.token_to_kv_pool).__name__}; the platform tpu_oot has "
                "multi-head attention over plain keys and values only: serve another model"
            )
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self._step: Step | None = None

    @contextlib.contextmanager
    def tracing(self, step: Step) -> Iterator[None]:
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **arguments: Any,
    ) -> torch.Tensor:
        """[tokens, heads * v_head_dim] for q [tokens, heads * head_dim]."""
        _refuse(layer, arguments)
        step = self._step
        index = 2 * (layer.layer_id - self.token_to_kv_pool.start_layer)
        if save_kv_cache and k is not None and v is not None:
            for offset, x in enumerate((k, v)):
                step.caches[index + offset] = self._write(step, step.caches[index + offset], x)
        keys, values = step.caches[index : index + 2]
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        attend, place = tt_ops.paged_attention_decode, step.positions
        if place is None:
            attend, place = tt_ops.chunked_attention, step.start
        # SGLang's size is that of what lies before a token.
        window = layer.sliding_window_size + 1 if layer.sliding_window_size > 0 else None
        out = attend(q, keys, values, step.page_table, place, layer.scaling, window)
        return out.reshape(out.shape[0], -1)

    @staticmethod
    def _write(step: Step, cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, *cache.shape[1::2])
        if step.positions is not None:
            return tt_ops.paged_update_cache(cache, x, step.page_table, step.positions)
        return write_chunk(cache, x, step.page_table, step.start, step.length)


@register_attention_backend(ATTENTION_BACKEND)
def _backend_of(model_runner: Any) -> PagedAttention:
    return PagedAttention(model_runner)
