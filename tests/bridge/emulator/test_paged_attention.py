"""The emulated chip's paged attention, against the formula in float64 over the tokens of each request."""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pypjrt
import pytest

sys.path.append(str(Path(__file__).parent.parent / "compiler"))
import chip

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}
NAMES = {np.dtype(np.float32): "f32", np.dtype(ml_dtypes.bfloat16): "bf16", np.dtype(np.int32): "i32"}
PAGES, PAGE = 24, 32


def call(target: str, result: np.ndarray, *operands: np.ndarray, alias: bool = False, **attributes) -> np.ndarray:
    """One custom call; attributes are written as in MLIR."""

    def tensor(array):
        return f"tensor<{'x'.join(map(str, array.shape))}x{NAMES[array.dtype]}>"

    names = [f"%a{i}" for i in range(len(operands))]
    types = ", ".join(map(tensor, operands))
    arguments = ", ".join(f"{name}: {tensor(array)}" for name, array in zip(names, operands, strict=True))
    config = ", ".join(f"{name} = {value}" for name, value in attributes.items())
    aliases = (
        ", output_operand_aliases = [#stablehlo.output_operand_alias<output_tuple_indices = [],"
        " operand_index = 0, operand_tuple_indices = []>]"
        if alias
        else ""
    )
    (out,) = chip.run(
        f"""func.func @main({arguments}) -> {tensor(result)} {{
        %r = stablehlo.custom_call @{target}({", ".join(names)}) {{api_version = 4 : i32,
          backend_config = {{{config}}}{aliases}}} : ({types}) -> {tensor(result)}
        return %r : {tensor(result)} }}""",
        *operands,
    )
    return out


def caches(rng, dtype, heads=3, dim=64):
    return [rng.standard_normal((PAGES, heads, PAGE, dim)).astype(DTYPES[dtype]) for _ in range(2)]


def tokens_of(cache, table_row):
    """[heads, positions, dim] in float64; a page of -1 reads as zeros."""
    pages = [np.zeros(cache.shape[1:]) if page < 0 else cache[page].astype(np.float64) for page in table_row]
    return np.concatenate(pages, axis=1)


def softmax_attention(q, keys, values, scale, visible, bias=0.0, sink=None):
    """q [H, D], keys and values [K, S, D], visible [S] or [H, S]; a sink takes weight only."""
    group = q.shape[0] // keys.shape[0]
    scores = np.einsum("hd,hsd->hs", q.astype(np.float64), keys.repeat(group, 0)) * scale + bias
    scores = np.where(visible, scores, -np.inf)
    high = scores.max(-1, keepdims=True) if sink is None else np.maximum(scores.max(-1, keepdims=True), sink[:, None])
    weights = np.exp(scores - high)
    total = weights.sum(-1, keepdims=True) + (0 if sink is None else np.exp(sink[:, None] - high))
    return np.einsum("hs,hsd->hd", weights / total, values.repeat(group, 0))


def decode(q, keys, values, table, positions, *extra, scale=0.125, **attributes):
    flags = {"has_attention_mask": "false", "has_cur_pos_tensor": "true", "has_attention_sink": "false"} | attributes
    operands = [q, keys, values, table, *extra]
    if flags["has_cur_pos_tensor"] == "true":
        operands.insert(5 if flags["has_attention_mask"] == "true" else 4, positions)
    return call(
        "tt.paged_scaled_dot_product_attention_decode", q, *operands,
        is_causal="true", scale=f"{scale} : f32", **flags,
    )  # fmt: skip


def close(out, expected, dtype):
    tolerance = 2e-5 if dtype == "f32" else 2e-2
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("heads", [3, 9, 12])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", [[0], [31], [32, 100], [7, 255, 128, 64]], ids=str)
def test_decode_attends_up_to_each_position(positions, dtype, heads):
    """Requests of different lengths, at the edges of pages, with one and with several query heads a key head."""
    rng = np.random.default_rng(1)
    batch = len(positions)
    keys, values = caches(rng, dtype)
    q = rng.standard_normal((1, batch, heads, 64)).astype(DTYPES[dtype])
    table = rng.integers(0, PAGES, (batch, 8)).astype(np.int32)
    out = decode(q, keys, values, table, np.array(positions, np.int32))
    for b, position in enumerate(positions):
        k, v = tokens_of(keys, table[b]), tokens_of(values, table[b])
        close(out[0, b], softmax_attention(q[0, b], k, v, 0.125, np.arange(256) <= position), dtype)


def test_a_long_request_is_split_between_threads():
    """Parts that several threads compute are brought together by their highest scores."""
    rng = np.random.default_rng(2)
    keys, values = caches(rng, "f32")
    keys[rng.integers(0, PAGES, 4)] *= 8  # some pages hold far higher scores
    table = rng.integers(0, PAGES, (1, 72)).astype(np.int32)
    q = rng.standard_normal((1, 1, 6, 64)).astype(np.float32)
    out = decode(q, keys, values, table, np.array([2200], np.int32))
    k, v = tokens_of(keys, table[0]), tokens_of(values, table[0])
    close(out[0, 0], softmax_attention(q[0, 0], k, v, 0.125, np.arange(72 * PAGE) <= 2200), "f32")


def test_a_skipped_request_is_zero():
    """Position -1 means that the request is not there."""
    rng = np.random.default_rng(3)
    keys, values = caches(rng, "f32")
    table = np.zeros((2, 8), np.int32)
    q = rng.standard_normal((1, 2, 3, 64)).astype(np.float32)
    out = decode(q, keys, values, table, np.array([-1, 5], np.int32))
    assert (out[0, 0] == 0).all() and (out[0, 1] != 0).any()


def test_no_page_reads_as_zeros_and_one_that_is_not_there_as_nan():
    """-1 in a page table is an empty page; a page number beyond the cache must not look like a result."""
    rng = np.random.default_rng(4)
    keys, values = caches(rng, "f32")
    q = rng.standard_normal((1, 2, 3, 64)).astype(np.float32)
    table = np.array([[1, -1, 2, 3], [1, PAGES, 2, 3]], np.int32)
    out = decode(q, keys, values, table, np.array([100, 100], np.int32))
    k, v = tokens_of(keys, table[0]), tokens_of(values, table[0])
    close(out[0, 0], softmax_attention(q[0, 0], k, v, 0.125, np.arange(128) <= 100), "f32")
    assert np.isnan(out[0, 1]).all()


@pytest.mark.parametrize("window", [1, 40, 1000])
def test_a_sliding_window_hides_what_is_older(window):
    """Only the last `window` positions are seen."""
    rng = np.random.default_rng(5)
    keys, values = caches(rng, "f32")
    table = rng.integers(0, PAGES, (1, 8)).astype(np.int32)
    q = rng.standard_normal((1, 1, 3, 64)).astype(np.float32)
    out = decode(q, keys, values, table, np.array([200], np.int32), sliding_window_size=f"{window} : i64")
    k, v = tokens_of(keys, table[0]), tokens_of(values, table[0])
    seen = (np.arange(256) <= 200) & (np.arange(256) > 200 - window)
    close(out[0, 0], softmax_attention(q[0, 0], k, v, 0.125, seen), "f32")


def test_a_mask_is_added_and_a_sink_takes_weight():
    """With a mask in place of positions, and a sink for each head."""
    rng = np.random.default_rng(6)
    keys, values = caches(rng, "f32")
    table = rng.integers(0, PAGES, (2, 4)).astype(np.int32)
    q = rng.standard_normal((1, 2, 6, 64)).astype(np.float32)
    mask = np.where(rng.random((2, 1, 6, 128)) < 0.3, -np.inf, rng.standard_normal((2, 1, 6, 128))).astype(np.float32)
    sink = rng.standard_normal((6, 32)).astype(np.float32)
    out = decode(
        q, keys, values, table, None, mask, sink,
        has_attention_mask="true", has_cur_pos_tensor="false", has_attention_sink="true",
    )  # fmt: skip
    for b in range(2):
        k, v = tokens_of(keys, table[b]), tokens_of(values, table[b])
        expected = softmax_attention(q[0, b], k, v, 0.125, True, mask[b, 0].astype(np.float64), sink[:, 0])
        close(out[0, b], expected, "f32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 64, 500])
def test_a_chunk_attends_causally(start, dtype):
    """Each token of a prefill chunk sees what was before it and itself."""
    rng = np.random.default_rng(7)
    keys, values = caches(rng, dtype)
    table = rng.integers(0, PAGES, (1, 24)).astype(np.int32)
    q = rng.standard_normal((1, 6, 64, 64)).astype(DTYPES[dtype])
    out = call(
        "tt.chunked_scaled_dot_product_attention", q, q, keys, values, table, np.array([start], np.int32),
        scale="0.2 : f32",
    )  # fmt: skip
    k, v = tokens_of(keys, table[0]), tokens_of(values, table[0])
    for token in (0, 1, 31, 63):
        expected = softmax_attention(q[0, :, token], k, v, 0.2, np.arange(24 * PAGE) <= start + token)
        close(out[0, :, token], expected, dtype)


@pytest.mark.parametrize("alias", [False, True])
def test_update_writes_one_row_a_request(alias):
    """Rows go where the page table says; -1 and pages that are not there write nothing; the rest is untouched."""
    rng = np.random.default_rng(8)
    cache = rng.standard_normal((PAGES, 3, PAGE, 64)).astype(np.float32)
    x = rng.standard_normal((1, 4, 3, 64)).astype(np.float32)
    table = np.array([[5, 6], [7, 8], [9, 10], [-1, -1]], np.int32)
    positions = np.array([0, 40, -1, 3], np.int32)
    out = call("tt.paged_update_cache", cache, cache, x, positions, table, alias=alias, share_cache="false")
    expected = cache.copy()
    expected[5, :, 0], expected[8, :, 8] = x[0, 0], x[0, 1]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("tokens", [32, 50, 96])
def test_fill_writes_whole_pages_and_the_rest_of_one(tokens):
    """The positions of one request from its first page on, in the pages of its row."""
    rng = np.random.default_rng(9)
    cache = rng.standard_normal((PAGES, 3, PAGE, 64)).astype(np.float32)
    x = rng.standard_normal((1, 3, tokens, 64)).astype(np.float32)
    table = np.array([[1, 2, 3, 4], [20, 11, 7, -1]], np.int32)
    out = call("tt.paged_fill_cache", cache, cache, x, table, np.array([1], np.int32))
    expected = cache.copy()
    for token in range(tokens):
        expected[table[1, token // PAGE], :, token % PAGE] = x[0, :, token]
    np.testing.assert_array_equal(out, expected)


def test_operands_that_do_not_fit_are_an_error():
    """The message names the call and what is wrong; nothing is read out of bounds."""
    rng = np.random.default_rng(10)
    keys, values = caches(rng, "f32")
    q = rng.standard_normal((1, 1, 4, 64)).astype(np.float32)
    with pytest.raises(pypjrt.errors.PjrtError, match="paged_scaled_dot_product_attention_decode.*multiple"):
        decode(q, keys, values, np.zeros((1, 8), np.int32), np.array([3], np.int32))


@pytest.mark.parametrize("types", [("f32", "bf16"), ("bf16", "f32")], ids=str)
def test_queries_and_caches_may_differ_in_type(types):
    """Scores of mixed types are computed in float32; the result has the queries' type."""
    rng = np.random.default_rng(11)
    keys, values = caches(rng, types[1])
    q = rng.standard_normal((1, 1, 6, 64)).astype(DTYPES[types[0]])
    table = rng.integers(0, PAGES, (1, 8)).astype(np.int32)
    out = decode(q, keys, values, table, np.array([77], np.int32))
    assert out.dtype == q.dtype
    k, v = tokens_of(keys, table[0]), tokens_of(values, table[0])
    close(out[0, 0], softmax_attention(q[0, 0], k, v, 0.125, np.arange(256) <= 77), types[0])


@pytest.mark.parametrize("types", [("f32", "bf16"), ("bf16", "f32")], ids=str)
def test_rows_are_written_in_the_caches_type(types):
    """What is written is rounded or widened to the cache's type."""
    rng = np.random.default_rng(12)
    cache = rng.standard_normal((4, 3, PAGE, 64)).astype(DTYPES[types[1]])
    x = rng.standard_normal((1, 1, 3, 64)).astype(DTYPES[types[0]])
    table, position = np.array([[2]], np.int32), np.array([9], np.int32)
    out = call("tt.paged_update_cache", cache, cache, x, position, table, share_cache="false")
    np.testing.assert_array_equal(out[2, :, 9], x[0, 0].astype(DTYPES[types[1]]))
