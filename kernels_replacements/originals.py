"""Every original that is replaced, as a table; nothing is imported for it.

What is known and not in it is interpreted: known_originals.txt lists the entry points of
each package that hold Pallas kernels.
"""

from kernels_replacements.registry import Replacement

_OPS = "jax.experimental.pallas.ops.tpu"
_DECODE = "tt.paged_scaled_dot_product_attention_decode"
_CHUNK = "tt.chunked_scaled_dot_product_attention"
_DENSE = "tt.scaled_dot_product_attention"
JAX, TORCH_TPU = ("jax", "0.10.2"), ("torch_tpu", "0.2.0")
VLLM, INFERENCE = ("vllm-torchtpu-core", "0.29.0"), ("tpu-inference", "0.32.0")


def _of(package: tuple[str, str], module: str, function: str, by: str, *calls: str, moved: bool = True) -> Replacement:
    return Replacement(module, function, by, calls, *package, moved=moved)


REPLACEMENTS: tuple[Replacement, ...] = (
    _of(JAX, f"{_OPS}.paged_attention.paged_attention_kernel", "paged_attention", "paged_attention:paged_attention", _DECODE),  # fmt: skip
    _of(JAX, f"{_OPS}.ragged_paged_attention.kernel", "ragged_paged_attention", "paged_attention:ragged_paged_attention", _DECODE, _CHUNK),  # fmt: skip
    _of(JAX, f"{_OPS}.flash_attention", "flash_attention", "dense_attention:flash_attention", _DENSE),
    _of(JAX, f"{_OPS}.splash_attention.splash_attention_kernel", "_splash_attention_forward", "dense_attention:splash_attention_forward", _DENSE),  # fmt: skip
    _of(JAX, f"{_OPS}.splash_attention.splash_attention_kernel", "_splash_attention_bwd_dq", "dense_attention:splash_attention_bwd_dq"),  # fmt: skip
    _of(JAX, f"{_OPS}.splash_attention.splash_attention_kernel", "_splash_attention_bwd_dkv", "dense_attention:splash_attention_bwd_dkv"),  # fmt: skip
    _of(JAX, f"{_OPS}.megablox.gmm", "gmm", "moe:gmm"),
    _of(JAX, f"{_OPS}.megablox.gmm", "tgmm", "moe:tgmm"),
    _of(JAX, f"{_OPS}.matmul", "matmul", "quantized_matmul:matmul"),
    _of(TORCH_TPU, "torch_tpu._internal.ops.scaled_mm.kernels.blockwise_scaled_mm_kernel", "blockwise_scaled_mm", "quantized_matmul:blockwise_scaled_mm"),  # fmt: skip
    _of(TORCH_TPU, "torch_tpu._internal.ops.scaled_mm.kernels.blockwise128_scaled_mm_kernel", "scaled_mm_1x128_128x128", "quantized_matmul:scaled_mm_1x128_128x128"),  # fmt: skip
)  # fmt: skip
