"""Which function gives each `tt.*` call its meaning on the emulated chip.

A function takes the call's operands, then its attributes by name, and returns
its results; shapes are in kernels_replacements.tt_calls.
"""

from collections.abc import Callable

from bridge.emulator import attention, cache, gated_delta, moe, sampling
from kernels_replacements import ragged_attention

CALLS: dict[str, Callable] = {
    "tt.paged_scaled_dot_product_attention_decode": attention.paged_attention_decode,
    "tt.chunked_scaled_dot_product_attention": attention.chunked_attention,
    "tt.scaled_dot_product_attention": attention.attention,
    "tt.paged_flash_mla_decode": attention.mla_decode,
    "tt.flash_mla_prefill": attention.mla_prefill,
    "tt.paged_update_cache": cache.paged_update_cache,
    "tt.paged_fill_cache": cache.paged_fill_cache,
    "tt.state_pool_update": cache.state_pool_update,
    "tt.gated_delta_rule": gated_delta.gated_delta_rule,
    "tt.gated_delta_decode": gated_delta.gated_delta_decode,
    "tt.causal_conv1d_update": gated_delta.causal_conv1d_update,
    "tt.fused_moe_ep": moe.fused_moe_ep,
    "tt.sparse_matmul": moe.sparse_matmul,
    "tt.sampling": sampling.sampling,
    # Marks for libtt's memory planning: a value is what it is.
    "tt.mark_argument": lambda x, **_marks: x,
    "tt.weight_dtype_override": lambda x, **_marks: x,
}

# Composites of calls that this chip computes better whole: their names, and what is computed for them.
COMPOSITES: dict[str, Callable] = {ragged_attention.COMPOSITE: ragged_attention.composed_on_arrays}
