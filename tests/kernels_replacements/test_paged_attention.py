"""Replacements of paged attention kernels against float64, and against the originals that JAX can interpret."""

import functools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels_replacements import paged_attention as ours
from kernels_replacements import ragged_attention as ragged
from kernels_replacements.errors import KernelError

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
TOLERANCE = {BF16: 2e-2, F32: 3e-5}


def error(got, expected):
    """Largest difference relative to the largest value."""
    expected = np.asarray(expected, np.float64)
    got = np.asarray(got).astype(np.float64)
    assert np.isfinite(got).all()
    return np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-9)


def softmax_rows(q, k, v, positions, *, scale, window=None, soft_cap=None, sink=None, causal=True):
    """q [R, D] over k, v [L, D] in float64; row r sees columns up to positions[r]."""
    scores = q @ k.T * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    column = np.arange(len(k))
    if causal:
        scores = np.where(column <= positions[:, None], scores, -np.inf)
    if window is not None:
        scores = np.where(column > positions[:, None] - window, scores, -np.inf)
    high = scores.max(-1, keepdims=True)
    weights = np.exp(scores - high)
    total = weights.sum(-1, keepdims=True) + (0 if sink is None else np.exp(sink - high))
    return weights @ v / total


class Ragged:
    """A ragged batch over shuffled pages; entries of the table past a sequence's end are garbage."""

    def __init__(self, lengths, *, heads=4, kv_heads=2, dim=64, page=32, width=4, dtype=F32, spare=2, seed=0):
        """lengths: (positions in the cache, new tokens) of each sequence."""
        rng = np.random.default_rng(seed)
        self.lengths, self.page, self.kv_heads, self.dim, self.heads = lengths, page, kv_heads, dim, heads
        slots = len(lengths) + spare
        pages = slots * width + 3
        self.keys, self.values = (rng.standard_normal((pages, page, kv_heads, dim)).astype(dtype) for _ in range(2))
        self.table = rng.permutation(pages)[: slots * width].reshape(slots, width).astype(np.int32)
        new = [n for _, n in lengths]
        self.kv_lens = np.array([length for length, _ in lengths] + [7] * spare, np.int32)
        self.starts = np.array([0, *np.cumsum(new)] + [0] * spare, np.int32)
        self.total = sum(new) + 3
        self.q = rng.standard_normal((self.total, heads, dim)).astype(dtype)
        self.count = np.array([len(lengths)], np.int32)

    def of(self, sequence):
        """Keys and values of a sequence, [length, K, D] float64."""
        length = self.lengths[sequence][0]
        rows = self.table[sequence][: -(-length // self.page)]
        return tuple(
            c[rows].reshape(-1, self.kv_heads, self.dim)[:length].astype(np.float64) for c in (self.keys, self.values)
        )

    def expected(self, *, sink=None, **rules):
        out = np.zeros((self.total, self.heads, self.dim))
        for s, (length, new) in enumerate(self.lengths):
            keys, values = self.of(s)
            rows = slice(self.starts[s], self.starts[s] + new)
            for h in range(self.heads):
                kv = h // (self.heads // self.kv_heads)
                at = np.arange(length - new, length)
                one = None if sink is None else float(sink[h])
                q = self.q[rows, h].astype(np.float64)
                out[rows, h] = softmax_rows(q, keys[:, kv], values[:, kv], at, sink=one, **rules)
        return out

    def interleaved(self):
        """[N, P, 2K, D]"""
        return np.stack([self.keys, self.values], 3).reshape(*self.keys.shape[:2], 2 * self.kv_heads, self.dim)


DECODE = [(1, 1), (32, 1), (33, 1), (100, 1)]
PREFILL = [(31, 31), (40, 8), (96, 64)]
MIXED = [(33, 1), (45, 45), (1, 1), (70, 6)]


def by_calls(q, cache, kv_lens, table, starts, count):
    """What a chip gets that does not compute the composite whole, which is to say silicon."""
    batch = ragged.Batch(kv_lens, table, starts, count[0])
    return ragged.by_calls(q, ragged.Pages(cache, 2, 64), batch, ragged.Rules(0.125))


@pytest.mark.parametrize("lengths", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("form", ["composite", "calls"])
def test_ragged_attention(on_chip, form, lengths, dtype):
    """Decodes, prefills and both at once are what float64 says; tokens of no sequence are zeros."""
    batch = Ragged(lengths, dtype=dtype)
    run = by_calls if form == "calls" else functools.partial(ours.ragged_paged_attention, sm_scale=0.125)
    (out,) = on_chip(run, batch.q, batch.interleaved(), batch.kv_lens, batch.table, batch.starts, batch.count)
    assert error(out, batch.expected(scale=0.125)) < TOLERANCE[dtype]


def test_each_chip_gets_its_form():
    """The emulated chip reads the pages where they are; libtt gets both calls."""
    import chip
    import jax

    batch = Ragged(MIXED)
    arrays = (batch.q, batch.interleaved(), batch.kv_lens, batch.table, batch.starts, batch.count)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    program = str(jax.jit(ours.ragged_paged_attention).lower(*shapes).compiler_ir("stablehlo"))
    assert "@tt." not in chip.rewrite(program)
    for_silicon = chip.rewrite(program, "libtt")
    assert "@tt.paged_scaled_dot_product_attention_decode" in for_silicon
    assert "@tt.chunked_scaled_dot_product_attention" in for_silicon


@pytest.mark.parametrize(
    "rules",
    [{"sliding_window": 16}, {"soft_cap": 5.0}, {"sliding_window": 40, "soft_cap": 20.0}],
    ids=["window", "soft cap", "both"],
)
def test_ragged_attention_that_no_call_expresses(rules):
    """A window or a soft cap is composed of plain JAX, and right."""
    batch = Ragged(MIXED)
    arguments = (batch.q, batch.interleaved(), batch.kv_lens, batch.table, batch.starts, batch.count)
    out = ours.ragged_paged_attention(*arguments, sm_scale=0.125, **rules)
    expected = batch.expected(scale=0.125, window=rules.get("sliding_window"), soft_cap=rules.get("soft_cap"))
    assert error(out, expected) < TOLERANCE[F32]


def test_an_unusual_layout_is_composed():
    """Pages of 16 and a head dimension of 80, which TTNN does not have, are right all the same."""
    batch = Ragged(MIXED, dim=80, page=16, width=8)
    out = ours.ragged_paged_attention(
        batch.q, batch.interleaved(), batch.kv_lens, batch.table, batch.starts, batch.count, sm_scale=0.1
    )
    assert error(out, batch.expected(scale=0.1)) < TOLERANCE[F32]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.lists(st.integers(1, 128).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, min(n, 20)))), max_size=4))
def test_any_ragged_batch(lengths):
    """Whatever the lengths are, and without any sequence, the composed form is what float64 says."""
    batch = Ragged(lengths, spare=4 - len(lengths) + 1)
    # One program for all batches: as many tokens and sequences as the largest.
    q = np.zeros((83, batch.heads, batch.dim), F32)
    q[: batch.total] = batch.q
    cache = np.zeros((64, 32, 4, 64), F32)
    cache[: len(batch.keys)] = batch.interleaved()
    out = _composed(q, cache, batch.kv_lens, batch.table, batch.starts, batch.count)
    expected = batch.expected(scale=0.125)
    live = batch.starts[len(lengths)]
    assert error(out[:live], expected[:live]) < TOLERANCE[F32] if live else not np.asarray(out).any()


@functools.cache
def _jitted():
    import jax

    def run(q, cache, kv_lens, table, starts, count):
        pages, batch = ragged.Pages(cache, 2, 64), ragged.Batch(kv_lens, table, starts, count[0])
        return ragged.composed(q, pages, batch, ragged.Rules(0.125))

    return jax.jit(run)


def _composed(*arrays):
    return np.asarray(_jitted()(*arrays))


def test_a_page_that_is_not_there_gives_no_number():
    """A table entry past the last page poisons its sequence, and no other."""
    batch = Ragged([(40, 1), (40, 1)])
    batch.table[1, 0] = 10_000
    out = np.asarray(
        ours.ragged_paged_attention(
            batch.q, batch.interleaved(), batch.kv_lens, batch.table, batch.starts, batch.count, soft_cap=50.0
        )
    )
    assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()


# ---- JAX's paged_attention


def head_major(batch):
    """[K, N, P, D] of keys and of values."""
    return (np.ascontiguousarray(c.transpose(2, 0, 1, 3)) for c in (batch.keys, batch.values))


def original_paged_attention(batch, table, **options):
    """JAX's own kernel, interpreted."""
    import jax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention_kernel as kernel

    original = kernel.paged_attention
    del pl
    with pltpu.force_tpu_interpret_mode():
        keys, values = head_major(batch)
        count = len(batch.lengths)
        return np.asarray(
            jax.jit(functools.partial(original, pages_per_compute_block=4, **options))(
                batch.q[:count], keys, values, batch.kv_lens[:count], table
            )
        )


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_paged_attention_against_the_original(on_chip, dtype):
    """Within tolerance of float64, and at most twice the error of JAX's interpreted kernel."""
    batch = Ragged(DECODE, dim=128, heads=4, dtype=dtype, spare=0)
    batch.q = (batch.q.astype(np.float32) * 0.1).astype(dtype)
    count = len(batch.lengths)
    table = np.where(np.arange(4) * 32 < batch.kv_lens[:, None], batch.table, 0).astype(np.int32)
    run = functools.partial(ours.paged_attention, pages_per_compute_block=4)
    (out,) = on_chip(run, batch.q[:count], *head_major(batch), batch.kv_lens, table)
    expected = batch.expected(scale=1.0)[:count]
    assert error(out, expected) < TOLERANCE[dtype]
    theirs = error(original_paged_attention(batch, table), expected)
    assert error(out, expected) <= 2 * max(theirs, 1e-6)


def test_paged_attention_with_a_soft_cap():
    """A soft cap, which no call knows, is composed."""
    batch = Ragged(DECODE, spare=0)
    out = ours.paged_attention(
        batch.q[:4], *head_major(batch), batch.kv_lens, batch.table, attn_logits_soft_cap=8.0, pages_per_compute_block=4
    )
    assert error(out, batch.expected(scale=1.0, soft_cap=8.0)[:4]) < TOLERANCE[F32]


def test_paged_attention_over_int8_pages():
    """Quantized pages are read as value = int8 * scale / 127.5."""
    batch = Ragged(DECODE, spare=0)
    quantized = []
    for name in ("keys", "values"):
        cache = getattr(batch, name)
        scales = np.abs(cache).max(-1, keepdims=True)
        weight = np.rint(cache * 127.5 / scales).clip(-128, 127).astype(np.int8)
        setattr(batch, name, (weight * scales / 127.5).astype(F32))
        quantized.append(tuple(np.ascontiguousarray(x.transpose(2, 0, 1, 3)) for x in (weight, scales)))
    out = ours.paged_attention(
        batch.q[:4], *quantized, batch.kv_lens, batch.table, pages_per_compute_block=4, attn_logits_soft_cap=1e4
    )
    assert error(out, batch.expected(scale=1.0, soft_cap=1e4)[:4]) < TOLERANCE[F32]


def test_heads_that_do_not_divide_are_an_error():
    """The message names the kernel and the heads."""
    batch = Ragged(DECODE, heads=3)
    with pytest.raises(KernelError, match="ragged_paged_attention: 3 query heads are no multiple of 2"):
        ours.ragged_paged_attention(
            batch.q, batch.interleaved(), batch.kv_lens, batch.table, batch.starts, batch.count
        )
