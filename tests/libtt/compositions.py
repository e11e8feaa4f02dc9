"""Programs of more than one `tt.*` call: what the kernel replacements compose, one of each kind."""

import functools

import jax
import jax.numpy as jnp

from kernels_replacements import dense_attention, gated_delta, latent_attention, moe, paged_attention, quantized_matmul, window_attention

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
SEQUENCES, WIDTH, PAGES, TOKENS = 4, 8, 32, 64


def s(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


LENGTHS, STARTS, TABLE = s(SEQUENCES, dtype=I32), s(SEQUENCES + 1, dtype=I32), s(SEQUENCES, WIDTH, dtype=I32)
FLAT_TABLE, DISTRIBUTION = s(SEQUENCES * WIDTH, dtype=I32), s(3, dtype=I32)
BATCH = (LENGTHS, FLAT_TABLE, STARTS, DISTRIBUTION)
MOE_OPTIONS = dict(top_k=2, bt=1, bf=1, bd1=1, bd2=1, btc=1, bfc=1, bd1c=1, bd2c=1)


class OneChip:
    """A mesh of one, hashable as JAX's are."""

    size = 1


def fused_moe(tokens, w1, w2, gating):
    return moe.fused_ep_moe(OneChip(), tokens, w1, w2, gating, **MOE_OPTIONS)


def flash_gradient(q, k, v):
    return jax.grad(lambda *x: dense_attention.flash_attention(*x, causal=True).astype(F32).sum(), (0, 1, 2))(q, k, v)


PROGRAMS = {
    "paged attention, heads before pages": (functools.partial(paged_attention.paged_attention, pages_per_compute_block=4), s(2, 8, 64), s(2, PAGES, 64, 64), s(2, PAGES, 64, 64), s(2, dtype=I32), s(2, 8, dtype=I32)),
    "ragged attention, mixed": (paged_attention.ragged_paged_attention, s(TOKENS, 8, 64), s(PAGES, 32, 4, 64), LENGTHS, TABLE, STARTS, s(1, dtype=I32)),
    "ragged attention, composed": (functools.partial(paged_attention.ragged_paged_attention, soft_cap=20.0, sliding_window=32), s(TOKENS, 8, 64), s(PAGES, 32, 4, 64), LENGTHS, TABLE, STARTS, s(1, dtype=I32)),
    "ragged attention v3, with its update": (paged_attention.ragged_paged_attention_v3, s(TOKENS, 8, 128), s(TOKENS, 2, 128), s(TOKENS, 2, 128), s(PAGES, 32, 2, 2, 128), *BATCH),
    "latent attention": (latent_attention.mla_ragged_paged_attention_v1, s(TOKENS, 8, 256), s(TOKENS, 8, 64), s(TOKENS, 256), s(TOKENS, 64), s(PAGES, 16, 2, 384), *BATCH),
    "flash attention and its gradients": (flash_gradient, *(s(1, 4, 64, 64) for _ in range(3))),
    "convolution and gated delta rule": (functools.partial(gated_delta.fused_conv1d_gdn, n_kq=2, n_v=4, d_k=128, d_v=128, kernel_size=4), s(TOKENS, 1024), s(TOKENS, 4), s(TOKENS, 4), s(8, 3, 1024), s(8, 4, 128, 128, dtype=F32), s(1024, 1, 4), None, s(4, dtype=F32), s(4, dtype=F32), STARTS, LENGTHS, DISTRIBUTION, LENGTHS),
    "routing and experts": (fused_moe, s(32, 256), s(8, 2, 256, 128), s(8, 128, 256), s(32, 8)),
    "grouped products": (moe.gmm, s(TOKENS, 64), s(4, 64, 64), s(4, dtype=I32)),
    "update of slices": (paged_attention.kv_cache_update, s(32, 4, 128), s(3, 8, dtype=I32), s(256, 4, 128), s(1, dtype=I32)),
    "chunk under a window": (functools.partial(window_attention.chunked_window_attention, scale=0.125, sliding_window=100), s(1, 8, 64, 64), s(PAGES, 2, 32, 64), s(PAGES, 2, 32, 64), s(1, WIDTH, dtype=I32), s(1, dtype=I32)),
    "product": (functools.partial(quantized_matmul.matmul, block_shape=(32, 32)), s(64, 64), s(64, 64)),
}  # fmt: skip
