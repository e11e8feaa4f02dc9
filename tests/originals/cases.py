"""Inputs on which originals of vllm-torchtpu-core 0.29.0 and tpu-inference 0.32.0 are asked, and what replaces them.

`make test-originals` asks the originals, in an environment of their own, compares the
replacements with them there, and keeps their answers in expected.npz; the main tests make
the same inputs again and compare with those. Only numpy is imported here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

BF16, F32, F8 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(ml_dtypes.float8_e4m3fn)
VLLM, INFERENCE = "vllm_torchtpu.kernels", "tpu_inference.kernels"


@dataclass(frozen=True)
class Case:
    """One question.

    Attributes:
        original: "module:function" that answers it, the kernel itself or the reference beside it.
        by: "family:function" that replaces the kernel.
        arrays: makes the positional arguments; None among them stays None.
        options: keyword arguments of both.
        only: keyword arguments of the original alone.
        live: rows of the first result that count, the others belong to no sequence.
        tolerance: relative to the largest value, of each result.
    """

    original: str
    by: str
    arrays: Callable[[], list]
    options: dict[str, Any] = field(default_factory=dict)
    only: dict[str, Any] = field(default_factory=dict)
    live: int | None = None
    tolerance: float = 1e-2


def normal(seed: int, *shape: int, dtype=F32, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


LENGTHS = {
    "decode": ([40, 33, 1], [1, 1, 1], (3, 3, 3)),
    "prefill": ([40, 17], [40, 9], (0, 0, 2)),
    "mixed": ([64, 20, 33], [1, 20, 5], (1, 1, 3)),
}
SEQUENCES, WIDTH, PAGE, PAGES = 4, 4, 32, 24


def batch(form: str) -> tuple[list[np.ndarray], int]:
    """kv_lens, page_indices, cu_q_lens, distribution, and how many tokens there are."""
    lengths, new, distribution = LENGTHS[form]
    table = np.random.default_rng(7).permutation(PAGES)[: SEQUENCES * WIDTH].astype(np.int32)
    spare = SEQUENCES - len(lengths)
    kv_lens = np.array([*lengths, *[0] * spare], np.int32)
    starts = np.array([0, *np.cumsum(new), *[sum(new)] * spare], np.int32)
    return [kv_lens, table, starts, np.array(distribution, np.int32)], sum(new)


def rpa(form: str, *, dim: int, heads: int = 4, kv_heads: int = 2, dtype=BF16, sink: bool = False) -> list:
    rest, tokens = batch(form)
    packing = 4 // dtype.itemsize
    side_by_side = dim == 64
    rows = -(-(kv_heads if side_by_side else 2 * kv_heads) // packing)
    cache = normal(1, PAGES, PAGE, rows, packing, 128, dtype=dtype)
    q, k, v = (normal(seed, tokens, n, dim, dtype=dtype) for seed, n in ((2, heads), (3, kv_heads), (4, kv_heads)))
    return [q, k, v, cache, *rest, *([normal(5, heads)] if sink else [])]


def mla(form: str, *, dtype=BF16) -> list:
    rest, tokens = batch(form)
    packing = 4 // dtype.itemsize
    cache = normal(1, PAGES, PAGE // packing, packing, 256 + 128, dtype=dtype)
    cache[..., 256 + 64 :] = 0
    return [
        normal(2, tokens, 4, 256, dtype=dtype), normal(3, tokens, 4, 64, dtype=dtype),
        normal(4, tokens, 256, dtype=dtype), normal(5, tokens, 64, dtype=dtype), cache, *rest,
    ]  # fmt: skip


def slices(dtype=BF16) -> list:
    where = np.array([[3, 40, 64, 0], [0, 5, 11, 0], [5, 6, 13, 0]], np.int32)
    return [normal(1, 24, 4, 128, dtype=dtype), where, normal(2, 256, 4, 128, dtype=dtype), np.array([3], np.int32)]


def quantized(kind: str) -> list:
    if kind == "column":
        return [normal(1, 16, 256, dtype=BF16), normal(2, 256, 256).astype(F8), np.abs(normal(3, 256)) * 0.1]
    return [normal(1, 16, 512, dtype=BF16), normal(2, 256, 512).astype(F8), np.abs(normal(3, 2, 1, 256)) * 0.1]


_V3, _HD64 = "ragged_paged_attention.v3.kernel", "ragged_paged_attention.v3.kernel_hd64"
_BY3, _BY64 = "paged_attention:ragged_paged_attention_v3", "paged_attention:ragged_paged_attention_hd64"

CASES: dict[str, Case] = {
    **{f"v3 {form}": Case(f"{VLLM}.{_V3}:ref_ragged_paged_attention", _BY3, lambda form=form: rpa(form, dim=128), {"sm_scale": 0.09}, live=batch(form)[1]) for form in LENGTHS},
    "v3 window and soft cap": Case(f"{VLLM}.{_V3}:ref_ragged_paged_attention", _BY3, lambda: rpa("mixed", dim=128), {"sm_scale": 0.09, "sliding_window": 16, "soft_cap": 20.0}, live=26),
    "v3 float32": Case(f"{VLLM}.{_V3}:ref_ragged_paged_attention", _BY3, lambda: rpa("mixed", dim=128, dtype=F32), {"sm_scale": 0.09}, live=26, tolerance=1e-4),
    "v3 without update": Case(f"{VLLM}.{_V3}:ref_ragged_paged_attention", _BY3, lambda: rpa("mixed", dim=128), {"sm_scale": 0.09, "skip_kv_update": True}, live=26),
    "v3 of tpu_inference": Case(f"{INFERENCE}.{_V3}:ref_ragged_paged_attention", f"{_BY3}_inference", lambda: rpa("mixed", dim=128), {"sm_scale": 0.09}, live=26),
    **{f"hd64 {form}": Case(f"{VLLM}.{_HD64}:ref_ragged_paged_attention_hd64", _BY64, lambda form=form: rpa(form, dim=64, sink=True), {"sm_scale": 0.125}, live=batch(form)[1]) for form in LENGTHS},
    "hd64 window, not causal": Case(f"{VLLM}.{_HD64}:ref_ragged_paged_attention_hd64", _BY64, lambda: rpa("mixed", dim=64), {"sm_scale": 0.125, "sliding_window": 24}, live=26),
    "kv_cache_update": Case(f"{INFERENCE}.ragged_paged_attention.v2.ragged_kv_cache_update:kv_cache_update", "paged_attention:kv_cache_update", slices, {"page_size": 32}, {"num_slices_per_block": 4}, tolerance=0.0),
    **{f"mla v1 {form}": Case(f"{INFERENCE}.mla.v1.kernel:ref_mla_ragged_paged_attention", "latent_attention:mla_ragged_paged_attention_v1", lambda form=form: mla(form), {"sm_scale": 0.05}, live=batch(form)[1]) for form in LENGTHS},
    "flash_attention": Case(f"{VLLM}.flash_attention.kernel:flash_attention", "dense_attention:flash_attention_within_vmem", lambda: [normal(i, 1, 2, 128, 128, dtype=BF16) for i in range(3)], {"causal": True, "sm_scale": 0.09}, {"vmem_limit_bytes": None}),
    "router_topk": Case(f"{VLLM}.router_topk:router_topk", "moe:router_topk", lambda: [normal(1, 40, 64)], {"topk": 6}, tolerance=0.0),
    "quantized by column": Case(f"{VLLM}.quantized_matmul.kernel:quantized_matmul_kernel", "quantized_matmul:quantized_matmul_by_column", lambda: quantized("column")),
    "gmm of tpu_inference": Case(f"{INFERENCE}.megablox.gmm:gmm", "moe:gmm_scaled", lambda: [normal(1, 64, 128, dtype=BF16), normal(2, 4, 128, 128, dtype=BF16), np.array([10, 0, 30, 24], np.int32)], only={"tiling": (32, 128, 128), "interpret": True}),
}  # fmt: skip
