"""Every original that is replaced, as a table; nothing is imported for it.

What is known and not in it is interpreted: known_originals.txt lists the entry points of
each package that hold Pallas kernels.
"""

from dataclasses import dataclass
from pathlib import Path

from kernels_replacements.registry import Replacement

_OPS = "jax.experimental.pallas.ops.tpu"
_DECODE = "tt.paged_scaled_dot_product_attention_decode"
_CHUNK = "tt.chunked_scaled_dot_product_attention"
_DENSE = "tt.scaled_dot_product_attention"
# torch_tpu's own flash attention, which its C++ emits: kernels_replacements/flash_attention.py.
_CUDNN = "torch.ops.aten._scaled_dot_product_cudnn_attention"
JAX, TORCH_TPU = ("jax", "0.10.2"), ("torch_tpu", "0.2.0")
VLLM, INFERENCE = ("vllm-torchtpu-core", "0.29.0"), ("tpu-inference", "0.32.0")
SGL_JAX = ("sgl-jax", "")  # the same families; no version of it was checked


def _of(package: tuple[str, str], module: str, function: str, by: str, *calls: str, moved: bool = True) -> Replacement:
    return Replacement(module, function, by, calls, *package, moved=moved)


def _served(package: tuple[str, str], root: str) -> tuple[Replacement, ...]:
    """The kernels that the serving stacks share, each with the parameters of every stack that has it."""
    attention, rows = f"{root}.ragged_paged_attention", []
    for function, by, *calls in _SERVED:
        module, _, name = function.rpartition(".")
        # Two kernels of this name and these parameters want their scales in different shapes.
        rows.append(_of(package, f"{root}.{module}", name, by, *calls, moved=name != "quantized_matmul_kernel"))
    v2 = ("ragged_paged_attention", "paged_attention:ragged_paged_attention", _DECODE, _CHUNK)
    return (*rows, *(_of(package, f"{attention}.{place}", *v2) for place in ("v2.kernel", "ragged_paged_attention")))


_MLA = "tt.paged_flash_mla_decode"
_DELTA = ("tt.gated_delta_decode", "tt.gated_delta_rule")
_SERVED: tuple[tuple[str, ...], ...] = (
    ("ragged_paged_attention.v2.ragged_kv_cache_update.kv_cache_update", "paged_attention:kv_cache_update"),
    ("ragged_paged_attention.v2.ragged_kv_cache_update.kv_cache_update", "paged_attention:kv_cache_update_pipelined"),
    ("ragged_paged_attention.v3.kernel.ragged_paged_attention", "paged_attention:ragged_paged_attention_v3", _DECODE, _CHUNK),  # fmt: skip
    ("ragged_paged_attention.v3.kernel.ragged_paged_attention", "paged_attention:ragged_paged_attention_v3_inference", _DECODE, _CHUNK),  # fmt: skip
    ("ragged_paged_attention.v3.kernel_hd64.ragged_paged_attention_hd64", "paged_attention:ragged_paged_attention_hd64", _DECODE, _CHUNK),  # fmt: skip
    ("ragged_paged_attention.v3.kernel_hd64.ragged_paged_attention_hd64", "paged_attention:ragged_paged_attention_hd64_inference", _DECODE, _CHUNK),  # fmt: skip
    ("flash_attention.kernel.flash_attention", "dense_attention:flash_attention_within_vmem", _DENSE),
    ("flash_attention.kernel.encoder_only_flash_attention", "dense_attention:encoder_only_flash_attention"),
    ("mla.v1.kernel.mla_ragged_paged_attention", "latent_attention:mla_ragged_paged_attention_v1", _MLA),
    ("mla.v2.kernel.mla_ragged_paged_attention", "latent_attention:mla_ragged_paged_attention_v2", _MLA),
    ("mla.v2.kernel.mla_ragged_paged_attention", "latent_attention:mla_ragged_paged_attention_v2_inference", _MLA),
    ("gdn.v3.wrapper.fused_conv1d_gdn", "gated_delta:fused_conv1d_gdn", *_DELTA),
    ("gdn.v3.wrapper.fused_conv1d_gdn", "gated_delta:fused_conv1d_gdn_inference", *_DELTA),
    ("causal_conv1d.causal_conv1d.ragged_causal_conv1d", "gated_delta:ragged_causal_conv1d"),
    ("megablox.gmm.gmm", "moe:gmm_scaled"),
    ("megablox.gmm_v2.gmm_v2", "moe:gmm_v2"),
    ("fused_moe.v1.kernel.fused_ep_moe", "moe:fused_ep_moe", "tt.fused_moe_ep"),
    ("router_topk.router_topk", "moe:router_topk"),
    ("quantized_matmul.kernel.quantized_matmul_kernel", "quantized_matmul:quantized_matmul_by_column"),
    ("quantized_matmul.blockwise_kernel.quantized_matmul_kernel", "quantized_matmul:quantized_matmul_by_block"),
    ("collectives.all_gather_matmul.all_gather_matmul", "quantized_matmul:all_gather_matmul"),
    ("sparse_core.dense_gather_reduce.dense_gather_reduce", "sparse_core:dense_gather_reduce"),
    ("sparse_core.gather_reduce.sc_gather_reduce", "sparse_core:sc_gather_reduce"),
    ("sparse_core.ragged_gather_v2.ragged_gather_v2", "sparse_core:ragged_gather_v2"),
    ("sparse_core.ragged_gather_v2.ragged_gather_v2", "sparse_core:ragged_gather_v2_tuned"),
    ("sparse_core.ragged_scatter.ragged_scatter", "sparse_core:ragged_scatter"),
    ("sparse_core.ragged_gather_reduce.ragged_gather_reduce", "sparse_core:ragged_gather_reduce"),
    ("sparse_core.ragged_gather_reduce_v3.ragged_gather_reduce", "sparse_core:ragged_gather_reduce"),
    ("sparse_core.ragged_gather_reduce_v2.ragged_gather_reduce", "sparse_core:ragged_gather_reduce_tuned"),
    ("sparse_core.ragged_gather_reduce_v2.wrapper.ragged_gather_reduce_v2", "sparse_core:ragged_gather_reduce"),
    ("partial_kv_update.pallas_scatter_slots", "sparse_core:pallas_scatter_slots"),
    ("pool_adapters.copy_blocks", "sparse_core:copy_blocks"),
)  # fmt: skip


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
    *_served(VLLM, "vllm_torchtpu.kernels"),
    *_served(INFERENCE, "tpu_inference.kernels"),
    *_served(SGL_JAX, "sgl_jax.srt.kernels"),
)  # fmt: skip


@dataclass(frozen=True)
class Known:
    """An original and what becomes of it: a row of `tt-tpu kernels`.

    Attributes:
        package: the distribution that it belongs to.
        version: the one that was looked at; empty where none was.
        original: module and function.
        how: "calls" (of `tt.*`), "composed" of plain JAX or StableHLO, or "interpreted".
        calls: the `tt.*` calls, where it makes any.
    """

    package: str
    version: str
    original: str
    how: str
    calls: tuple[str, ...] = ()


def known() -> tuple[Known, ...]:
    """Every known original once, by package and name; nothing is imported for it."""
    lines = (Path(__file__).parent / "known_originals.txt").read_text().splitlines()
    listed = [line.split() for line in lines if not line.startswith("#")]
    rows = {f"{module}.{name}": Known(package, version, f"{module}.{name}", "interpreted") for package, version, module, name in listed}  # fmt: skip
    for one in REPLACEMENTS:
        # The stacks share kernels, but not every stack has every one.
        if one.original in rows or one.package not in (VLLM[0], INFERENCE[0]):
            how = "calls" if one.calls else "composed"
            rows[one.original] = Known(one.package, one.version, one.original, how, one.calls)
    rows[_CUDNN] = Known(*TORCH_TPU, _CUDNN, "composed")
    return tuple(sorted(rows.values(), key=lambda row: (row.package, row.original)))
