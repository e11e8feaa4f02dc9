"""Replacements of flash and splash attention against float64 and the originals, interpreted by JAX."""

import functools

import ml_dtypes
import numpy as np
import pytest

from kernels_replacements import dense_attention as ours

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402
from jax.experimental.pallas.ops.tpu import flash_attention as flash  # noqa: E402
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash  # noqa: E402
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks  # noqa: E402

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
TOLERANCE = {BF16: 2e-2, F32: 3e-5}


def error(got, expected):
    """Largest difference relative to the largest value."""
    got, expected = np.asarray(got).astype(np.float64), np.asarray(expected).astype(np.float64)
    assert np.isfinite(got).all()
    return np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-9)


def random(*shapes, dtype=F32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def softmax_attention(q, k, v, scale, seen=None, bias=0.0):
    """Float64 attention over the last two dimensions."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    scores = (q @ k.swapaxes(-1, -2) + bias) * scale
    scores = scores if seen is None else np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


CAUSAL = np.tril(np.ones((128, 128), bool))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("form", ["plain", "causal", "bias and segments"])
def test_flash_attention_against_the_original(on_chip, form, dtype):
    """Within tolerance of float64 and at most twice the interpreted kernel's error."""
    q, k, v = random(*[(1, 2, 128, 64)] * 3, dtype=dtype)
    arrays, seen, bias, options = [q, k, v], None, 0.0, {"sm_scale": 0.125, "causal": form == "causal"}
    if form == "causal":
        seen = CAUSAL
    if form == "bias and segments":
        (ab,) = random((1, 2, 128, 128), seed=1)
        segments = np.repeat(np.array([[0, 1]], np.int32), 64, axis=1)
        arrays += [ab.astype(dtype), segments, segments]
        seen, bias = segments[0][:, None] == segments[0], arrays[3].astype(np.float64)

    def run(function, q, k, v, ab=None, of_rows=None, of_columns=None):
        ids = None if of_rows is None else flash.SegmentIds(of_rows, of_columns)
        return function(q, k, v, ab, ids, **options)

    (out,) = on_chip(functools.partial(run, ours.flash_attention), *arrays)
    expected = softmax_attention(q, k, v, 0.125, seen, bias)
    with pltpu.force_tpu_interpret_mode():
        theirs = error(run(flash.flash_attention, *arrays), expected)
    assert error(out, expected) < TOLERANCE[dtype]
    assert error(out, expected) <= 2 * max(theirs, 1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_backward(on_chip, causal):
    """Gradients of q, k and v are those of the plain formula in float64's place."""
    q, k, v, weight = random(*[(1, 2, 64, 64)] * 4)

    def loss(q, k, v):
        return (ours.flash_attention(q, k, v, causal=causal, sm_scale=0.125) * weight).sum()

    def plain(q, k, v):
        scores = jnp.einsum("bhtd,bhsd->bhts", q, k) * 0.125
        scores = jnp.where(jnp.tril(jnp.ones((64, 64), bool)), scores, -1e30) if causal else scores
        return (jnp.einsum("bhts,bhsd->bhtd", jax.nn.softmax(scores, -1), v) * weight).sum()

    got = on_chip(jax.grad(loss, argnums=(0, 1, 2)), q, k, v)
    for mine, expected in zip(got, jax.grad(plain, argnums=(0, 1, 2))(q, k, v), strict=True):
        assert error(mine, expected) < 1e-4


BLOCKS = splash.BlockSizes(
    block_q=128, block_kv=128, block_q_dkv=128, block_kv_dkv=128, block_q_dq=128, block_kv_dq=128
)
FUSED = splash.BlockSizes(
    block_q=128, block_kv=128, block_q_dkv=128, block_kv_dkv=128, use_fused_bwd_kernel=True
)
SPLASH_MASKS = {
    "causal": lambda shape: masks.CausalMask(shape),
    "window": lambda shape: masks.LocalMask(shape, window_size=(40, 0), offset=0),
    "stored": lambda shape: masks.NumpyMask(np.random.default_rng(5).random(shape) < 0.4) | masks.NumpyMask(np.eye(shape[0], dtype=bool)),
    "full": lambda shape: masks.FullMask(shape),
}


def splash_kernel(mask, heads, blocks=BLOCKS, **options):
    return splash.make_splash_mha(
        masks.MultiHeadMask([mask] * heads), head_shards=1, q_seq_shards=1, block_sizes=blocks, **options
    )


def by_ours(monkeypatch):
    for name in ("forward", "bwd_dq", "bwd_dkv"):
        monkeypatch.setattr(splash, f"_splash_attention_{name}", getattr(ours, f"splash_attention_{name}"))
    jax.clear_caches()


@pytest.mark.parametrize("form", SPLASH_MASKS)
def test_splash_attention_under_a_mask(on_chip, monkeypatch, form):
    """Two query heads a key head under each kind of mask, batched by vmap, are what float64 says."""
    mask = SPLASH_MASKS[form]((256, 256))
    q, k, v = random((2, 4, 256, 64), (2, 2, 256, 64), (2, 2, 256, 64))
    by_ours(monkeypatch)
    (out,) = on_chip(jax.vmap(splash_kernel(mask, 4)), q * 0.125, k, v)
    expected = softmax_attention(q, np.repeat(k, 2, 1), np.repeat(v, 2, 1), 0.125, mask[:, :])
    assert error(out, expected) < TOLERANCE[F32]


@pytest.mark.parametrize("blocks", [BLOCKS, FUSED], ids=["apart", "fused"])
@pytest.mark.parametrize("form", ["causal", "stored"])
def test_splash_attention_backward(monkeypatch, form, blocks):
    """Gradients through JAX's own custom rule, with our kernels under it, are those of a plain formula."""
    mask = SPLASH_MASKS[form]((256, 256))
    dense = np.asarray(mask[:, :])
    q, k, v, weight = random((2, 256, 64), (1, 256, 64), (1, 256, 64), (2, 256, 64))
    q = q * np.float32(0.125)
    by_ours(monkeypatch)
    kernel = splash_kernel(mask, 2, blocks, attn_logits_soft_cap=30.0)

    def plain(q, k, v):
        scores = jnp.einsum("htd,hsd->hts", q, jnp.repeat(k, 2, 0))
        scores = jnp.where(dense, 30.0 * jnp.tanh(scores / 30.0), -1e30)
        return (jnp.einsum("hts,hsd->htd", jax.nn.softmax(scores, -1), jnp.repeat(v, 2, 0)) * weight).sum()

    got = jax.grad(lambda *x: (kernel(*x) * weight).sum(), argnums=(0, 1, 2))(q, k, v)
    for mine, expected in zip(got, jax.grad(plain, argnums=(0, 1, 2))(q, k, v), strict=True):
        assert error(mine, expected) < 1e-4


def test_splash_attention_with_sinks_and_segments(monkeypatch):
    """A sink takes weight and brings no value; segments do not see each other."""
    mask = SPLASH_MASKS["causal"]((128, 128))
    q, k, v, sinks = random((2, 128, 64), (128, 64), (128, 64), (2,))
    segments = np.repeat(np.array([0, 1], np.int32), 64)
    by_ours(monkeypatch)
    kernel = splash.make_splash_mqa(masks.MultiHeadMask([mask] * 2), head_shards=1, q_seq_shards=1, block_sizes=BLOCKS)
    out = kernel(q * 0.125, k, v, splash.SegmentIds(segments, segments), sinks)
    seen = np.asarray(mask[:, :]) & (segments[:, None] == segments)
    scores = np.where(seen, q.astype(np.float64) @ k.T * 0.125, -np.inf)
    weights = np.exp(scores)
    expected = weights / (weights.sum(-1, keepdims=True) + np.exp(sinks)[:, None, None]) @ v
    assert error(out, expected) < TOLERANCE[F32]
