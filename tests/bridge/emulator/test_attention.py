"""Attention calls compute what a plain float64 softmax says, whatever the pages' order and the lengths are."""

import functools

import ml_dtypes
import numpy as np
import pytest

from kernels_replacements import tt_calls

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
TOLERANCE = {BF16: 2e-2, F32: 2e-5}


def softmax_attention(q, k, v, scale, visible, sink=None, mask=0.0):
    """q [R, D], k and v [S, D], visible [R, S]; all float64; a row that sees nothing is zeros."""
    scores = np.where(visible, q @ k.T * scale + mask, -np.inf)
    high = scores.max(-1, keepdims=True, initial=-1e300 if sink is None else sink)
    weights = np.exp(scores - high)
    total = weights.sum(-1, keepdims=True) + (0.0 if sink is None else np.exp(sink - high))
    return weights @ v / np.where(total > 0, total, 1.0)


def close(got, expected, dtype):
    got, expected = got.astype(np.float64), np.asarray(expected)
    assert np.isfinite(got).all()
    scale = np.abs(expected).max() + 1e-9
    assert np.abs(got - expected).max() / scale < TOLERANCE[np.dtype(dtype)]


class Paged:
    """A cache of shuffled pages that holds the keys and values of some requests."""

    def __init__(self, rng, lengths, *, kv_heads, dim, page, width, dtype):
        self.width, self.page, batch = width, page, len(lengths)
        pages = batch * width + 1
        shape = (pages, kv_heads, page, dim)
        self.k, self.v = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
        self.table = rng.permutation(np.arange(1, pages)).reshape(batch, width).astype(np.int32)
        for row, length in zip(self.table, lengths, strict=True):
            row[-(-length // page) :] = -1

    def rows(self, cache, request, head):
        """[width * page, D] float64 of one request; a page of -1 is zeros."""
        table = self.table[request]
        read = cache[np.maximum(table, 0), head].astype(np.float64)
        read[table < 0] = 0.0
        return read.reshape(self.width * self.page, -1)


def reference_decode(q, paged, positions, *, sink=None, window=None, scale=None):
    _, batch, heads, dim = q.shape
    group = heads // paged.k.shape[1]
    out = np.zeros((1, batch, heads, dim))
    column = np.arange(paged.width * paged.page)
    for b in range(batch):
        for h in range(heads):
            visible = column <= positions[b]
            if window is not None:
                visible &= column > positions[b] - window
            k, v = (paged.rows(cache, b, h // group) for cache in (paged.k, paged.v))
            s = None if sink is None else np.float64(sink[h, 0])
            row = softmax_attention(q[0, b, h : h + 1].astype(np.float64), k, v, scale or dim**-0.5, visible[None], s)
            out[0, b, h] = row[0] if positions[b] >= 0 else 0.0
    return out


@pytest.mark.parametrize("dtype", (BF16, F32), ids=str)
@pytest.mark.parametrize("page", (32, 64, 128))
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), ((3, 3, 64), (8, 2, 128), (16, 1, 96), (4, 4, 256)))
def test_paged_decode(on_chip, page, heads, kv_heads, dim, dtype):
    """Each request sees its own pages up to its own position, also at page boundaries."""
    rng = np.random.default_rng(0)
    lengths = [1, page - 1, page, page + 1, 3 * page + 7]
    paged = Paged(rng, lengths, kv_heads=kv_heads, dim=dim, page=page, width=8, dtype=dtype)
    q = rng.standard_normal((1, len(lengths), heads, dim)).astype(dtype)
    positions = np.array(lengths, np.int32) - 1
    (got,) = on_chip(tt_calls.paged_attention_decode, q, paged.k, paged.v, paged.table, positions)
    close(got, reference_decode(q, paged, positions), dtype)


@pytest.mark.parametrize("window", (1, 33, 600, 5000))
def test_paged_decode_sees_a_sliding_window(on_chip, window):
    """Only the last `window` positions count, across block boundaries too."""
    rng = np.random.default_rng(1)
    lengths = [5, 700, 1100]
    paged = Paged(rng, lengths, kv_heads=2, dim=64, page=64, width=24, dtype=F32)
    q = rng.standard_normal((1, 3, 4, 64)).astype(F32)
    positions = np.array(lengths, np.int32) - 1
    call = functools.partial(tt_calls.paged_attention_decode, sliding_window=window)
    (got,) = on_chip(call, q, paged.k, paged.v, paged.table, positions)
    close(got, reference_decode(q, paged, positions, window=window), F32)


def test_paged_decode_with_a_sink(on_chip):
    """A sink takes weight and brings no value."""
    rng = np.random.default_rng(2)
    lengths = [1, 90]
    paged = Paged(rng, lengths, kv_heads=2, dim=64, page=64, width=8, dtype=F32)
    q = rng.standard_normal((1, 2, 4, 64)).astype(F32)
    sink = np.repeat(rng.standard_normal((4, 1)), 32, axis=1).astype(F32) * 3
    positions = np.array(lengths, np.int32) - 1

    def call(q, k, v, table, positions, sink):
        return tt_calls.paged_attention_decode(q, k, v, table, positions, sink=sink)

    (got,) = on_chip(call, q, paged.k, paged.v, paged.table, positions, sink)
    close(got, reference_decode(q, paged, positions, sink=sink), F32)


def test_paged_decode_with_a_mask(on_chip):
    """A mask is added to the scores of the whole table's width."""
    rng = np.random.default_rng(3)
    paged = Paged(rng, [512, 512], kv_heads=1, dim=64, page=64, width=8, dtype=F32)
    q = rng.standard_normal((1, 2, 2, 64)).astype(F32)
    mask = np.where(rng.random((2, 1, 2, 512)) < 0.5, -1e9, rng.standard_normal((2, 1, 2, 512))).astype(F32)

    def call(q, k, v, table, mask):
        return tt_calls.paged_attention_decode(q, k, v, table, mask=mask, is_causal=False)

    (got,) = on_chip(call, q, paged.k, paged.v, paged.table, mask)
    expected = np.zeros(q.shape)
    for b in range(2):
        k, v = (paged.rows(cache, b, 0) for cache in (paged.k, paged.v))
        expected[0, b] = softmax_attention(q[0, b].astype(np.float64), k, v, 64**-0.5, True, mask=mask[b, 0])
    close(got, expected, F32)


def test_paged_decode_skips_position_minus_one(on_chip):
    """A request at position -1 gives zeros, and the others are as without it."""
    rng = np.random.default_rng(4)
    paged = Paged(rng, [10, 1, 70], kv_heads=1, dim=64, page=64, width=8, dtype=F32)
    q = rng.standard_normal((1, 3, 2, 64)).astype(F32)
    positions = np.array([9, -1, 69], np.int32)
    (got,) = on_chip(tt_calls.paged_attention_decode, q, paged.k, paged.v, paged.table, positions)
    assert (got[0, 1] == 0).all()
    close(got, reference_decode(q, paged, positions), F32)


def test_a_page_of_minus_one_reads_as_zeros(on_chip):
    """A hole in the table counts as keys and values of zeros."""
    rng = np.random.default_rng(5)
    paged = Paged(rng, [200], kv_heads=1, dim=64, page=64, width=8, dtype=F32)
    paged.table[0, 1] = -1
    q = rng.standard_normal((1, 1, 2, 64)).astype(F32)
    positions = np.array([199], np.int32)
    (got,) = on_chip(tt_calls.paged_attention_decode, q, paged.k, paged.v, paged.table, positions)
    close(got, reference_decode(q, paged, positions), F32)


def test_a_page_that_is_not_there_gives_no_number(on_chip):
    """A table entry past the cache gives NaN and never another request's values."""
    rng = np.random.default_rng(6)
    paged = Paged(rng, [100], kv_heads=1, dim=64, page=64, width=8, dtype=F32)
    paged.table[0, 0] = 10_000
    q = rng.standard_normal((1, 1, 2, 64)).astype(F32)
    (got,) = on_chip(tt_calls.paged_attention_decode, q, paged.k, paged.v, paged.table, np.array([99], np.int32))
    assert np.isnan(got).all()


@pytest.mark.parametrize("dtype", (BF16, F32), ids=str)
@pytest.mark.parametrize(("chunk", "start"), ((32, 0), (64, 64), (64, 640), (256, 256)))
def test_chunked_attention(on_chip, chunk, start, dtype):
    """A chunk sees everything before it and itself up to each token."""
    rng = np.random.default_rng(7)
    heads, kv_heads, dim, page = 6, 2, 64, 64
    paged = Paged(rng, [start + chunk], kv_heads=kv_heads, dim=dim, page=page, width=16, dtype=dtype)
    q = rng.standard_normal((1, heads, chunk, dim)).astype(dtype)
    (got,) = on_chip(tt_calls.chunked_attention, q, paged.k, paged.v, paged.table, np.array([start], np.int32))
    visible = np.arange(16 * page) <= (start + np.arange(chunk))[:, None]
    expected = np.zeros(q.shape)
    for h in range(heads):
        k, v = (paged.rows(cache, 0, h // 3) for cache in (paged.k, paged.v))
        expected[0, h] = softmax_attention(q[0, h].astype(np.float64), k, v, dim**-0.5, visible)
    close(got, expected, dtype)


@pytest.mark.parametrize("dtype", (BF16, F32), ids=str)
@pytest.mark.parametrize(("causal", "window", "sink"), ((True, None, False), (False, None, False), (True, 5, False), (True, None, True)))  # fmt: skip
def test_dense_attention(on_chip, causal, window, sink, dtype):
    """Causal or not, with a window, with sinks, with fewer key/value heads than query heads."""
    rng = np.random.default_rng(8)
    q = rng.standard_normal((2, 4, 33, 64)).astype(dtype)
    k, v = (rng.standard_normal((2, 2, 33, 64)).astype(dtype) for _ in range(2))
    sinks = np.repeat(rng.standard_normal((4, 1)), 32, axis=1).astype(F32)

    def call(q, k, v, sinks):
        return tt_calls.attention(q, k, v, sink=sinks if sink else None, is_causal=causal, sliding_window=window)

    (got,) = on_chip(call, q, k, v, sinks)
    row, column = np.arange(33)[:, None], np.arange(33)
    visible = (column <= row) if causal else np.ones((33, 33), bool)
    if window is not None:
        visible = visible & (column > row - window)
    expected = np.zeros(q.shape)
    for b in range(2):
        for h in range(4):
            at = [x[b, h // 2].astype(np.float64) for x in (k, v)]
            s = np.float64(sinks[h, 0]) if sink else None
            expected[b, h] = softmax_attention(q[b, h].astype(np.float64), *at, 64**-0.5, visible, s)
    close(got, expected, dtype)


def test_mla_decode_and_prefill_agree(on_chip):
    """The last token of a prefill over latents is what a decode step over the same latents in pages gives."""
    rng = np.random.default_rng(9)
    tokens, heads, dim, dv, page = 70, 4, 96, 64, 64
    latents = rng.standard_normal((1, 1, tokens, dim)).astype(F32)
    q = rng.standard_normal((1, heads, tokens, dim)).astype(F32)
    prefill = functools.partial(tt_calls.mla_prefill, head_dim_v=dv)
    (whole,) = on_chip(prefill, q, latents)
    visible = np.arange(tokens) <= np.arange(tokens)[:, None]
    kv = latents[0, 0].astype(np.float64)
    for h in range(heads):
        close(whole[0, h], softmax_attention(q[0, h].astype(np.float64), kv, kv[:, :dv], dim**-0.5, visible), F32)
    cache = np.zeros((3, 1, page, dim), F32)
    cache[2, 0], cache[1, 0, : tokens - page] = latents[0, 0, :page], latents[0, 0, page:]
    table = np.array([[2, 1, -1, -1, -1, -1, -1, -1]], np.int32)
    decode = functools.partial(tt_calls.mla_decode, head_dim_v=dv)
    (last,) = on_chip(decode, q[:, :, -1:].transpose(0, 2, 1, 3).copy(), cache, table, np.array([tokens - 1], np.int32))
    close(last[0, 0], whole[0, :, -1].astype(np.float64), F32)
