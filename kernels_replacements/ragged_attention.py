"""Attention of a ragged batch over pages that hold keys and values together, as every TPU server keeps them.

TTNN's kernels want keys and values apart and heads before positions. `by_calls` takes the
pages of the batch there and uses the `tt.*` calls; `composed` is plain JAX, reads
the pages where they are in time that grows with the tokens, and knows what no call does
(soft caps, windows and sinks in prefill, no causality, float8). Where the calls fit, a
program gets them as a StableHLO composite, whose name tells the emulated chip what it may
compute by `composed` instead: a layout that is made anew costs it more than the attention.

Both take sequences of any length: a sequence of one new token is a decode, any other a prefill.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_replacements import tt_calls as tt

Array = jax.Array

MASKED = -1e30  # below every score; -inf would make a row that sees nothing a NaN
BLOCK_ELEMENTS = 1 << 20  # keys of one block, over all sequences: stays in a core's cache
CHUNK = 128  # rows of a prefill that are computed together
COMPOSITE = "tt_bridge.ragged_attention"  # bridge/emulator/calls.py has its meaning on the emulated chip
INTERLEAVED, SIDE_BY_SIDE = "interleaved", "side by side"


@dataclass(frozen=True)
class Pages:
    """Pages of keys and values: [N, P, R, L], R rows a token in lanes of L.

    Attributes:
        data: the pages.
        kv_heads: K, heads that the rows hold.
        dim: D, elements of a head that count.
        layout: "interleaved", row 2h holds head h's keys and row 2h+1 its values; or
            "side by side", row h holds head h's keys in its first D lanes and its values in the next.
    """

    data: Array
    kv_heads: int
    dim: int
    layout: str = INTERLEAVED

    @property
    def size(self) -> int:
        return self.data.shape[1]

    def read(self, pages: Array) -> tuple[Array, Array]:
        """Keys and values of pages [B, n], each [B, K, n*P, D]; page -1 reads as zeros."""
        held = read_pages(self.data, pages)
        batch, count = pages.shape
        return tuple(
            part.reshape(batch, count * self.size, self.kv_heads, self.dim).swapaxes(1, 2) for part in self._split(held)
        )

    def apart(self, pages: Array) -> tuple[Array, Array]:
        """Pages [n] as TTNN has them: keys and values, each [n, K, P, D]."""
        return tuple(part.swapaxes(1, 2) for part in self._split(self.data[jnp.clip(pages, 0, self.data.shape[0] - 1)]))

    def _split(self, held: Array) -> tuple[Array, Array]:
        if self.layout == INTERLEAVED:
            rows = held[..., : 2 * self.kv_heads, : self.dim]
            return rows[..., 0::2, :], rows[..., 1::2, :]
        rows = held[..., : self.kv_heads, :]
        return rows[..., : self.dim], rows[..., self.dim : 2 * self.dim]


@dataclass(frozen=True)
class ApartPages:
    """Pages of keys and of values as TTNN has them, each [N, K, P, D]."""

    keys: Array
    values: Array

    @property
    def size(self) -> int:
        return self.keys.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    def read(self, pages: Array) -> tuple[Array, Array]:
        """Keys and values of pages [B, n], each [B, K, n*P, D]; page -1 reads as zeros."""
        batch, count = pages.shape
        return tuple(
            read_pages(cache, pages).swapaxes(1, 2).reshape(batch, self.kv_heads, count * self.size, -1)
            for cache in (self.keys, self.values)
        )


def read_pages(cache: Array, pages: Array) -> Array:
    """cache[pages], with zeros for page -1 and NaN, which no result survives, for one past the last."""
    count = cache.shape[0]
    beyond = jnp.nan if jnp.issubdtype(cache.dtype, jnp.inexact) else 0
    fill = jnp.where(pages >= count, beyond, 0).astype(cache.dtype)
    there = (pages >= 0) & (pages < count)
    inner = (1,) * (cache.ndim - 1)
    return jnp.where(there.reshape(*there.shape, *inner), cache[jnp.where(there, pages, 0)], fill.reshape(*fill.shape, *inner))


@dataclass(frozen=True)
class Batch:
    """Which tokens belong to which sequence, and where its pages are.

    Attributes:
        kv_lens: [S] int32, positions in the cache, new ones included.
        page_table: [S, W] int32.
        starts: [S+1] int32, the first token of each sequence.
        count: [] int32, how many sequences there are.
    """

    kv_lens: Array
    page_table: Array
    starts: Array
    count: Array

    def live_pages(self, size: int) -> Array:
        """The page table with -1 wherever a row's sequence does not reach: what stands there means nothing."""
        first = jnp.arange(self.page_table.shape[1]) * size
        return jnp.where(first < self.kv_lens[:, None], self.page_table, -1)

    @property
    def new(self) -> Array:
        """[S] int32, new tokens of each sequence; 0 where there is none."""
        live = jnp.arange(self.kv_lens.shape[0]) < self.count
        return jnp.where(live, self.starts[1:] - self.starts[:-1], 0)

    def tokens(self, total: int) -> tuple[Array, Array, Array]:
        """Of each of `total` tokens: its sequence, its position there, and whether it is one; each [T]."""
        token = jnp.arange(total)
        sequences = self.kv_lens.shape[0]
        ends = jnp.where(jnp.arange(sequences) < self.count, self.starts[1:], jnp.iinfo(jnp.int32).max)
        sequence = jnp.minimum((token[:, None] >= ends[None]).sum(1), sequences - 1)
        last = jnp.where(self.count > 0, self.starts[self.count], 0)
        position = self.kv_lens[sequence] - self.new[sequence] + token - self.starts[sequence]
        return sequence, position, token < last


@dataclass(frozen=True)
class Rules:
    """How scores are made: static, so that programs differ by them.

    Attributes:
        scale: of the scores.
        window: how many positions back are seen, its own included; None for all.
        soft_cap: c in c * tanh(score / c), or None.
        causal: whether a position sees only itself and what is before it.
        value_scale: of the result.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    causal: bool = True
    value_scale: float = 1.0


def composed(
    q: Array, pages: Any, batch: Batch, rules: Rules, sink: Array | None = None, decoded: Array | None = None
) -> Array:
    """Attention of every token of the batch in plain JAX, scores and sums in float32.

    Args:
        q: [T, H, D].
        pages: Pages, ApartPages, or anything that reads and has a size and heads as they do.
        sink: [H] float, a score without a value for each head.
        decoded: [T, H, D] float32, what the sequences of one new token gave, if that is known.

    Returns:
        [T, H, D] float32; zeros for tokens that belong to no sequence.
    """
    out = _composed_decode(q, pages, batch, rules, sink) if decoded is None else decoded
    return _composed_prefill(q, pages, batch, rules, sink, out)


def _grouped(q: Array, kv_heads: int) -> Array:
    """[B, K, G*T, D] float32 from [B, T, H, D]."""
    batch, tokens, heads, dim = q.shape
    grouped = q.astype(jnp.float32).reshape(batch, tokens, kv_heads, heads // kv_heads, dim)
    return grouped.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, dim)


def _ungrouped(out: Array, tokens: int) -> Array:
    """[B, T, H, D] from [B, K, G*T, D]."""
    batch, kv_heads, rows, dim = out.shape
    apart = out.reshape(batch, kv_heads, rows // tokens, tokens, dim)
    return apart.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, -1, dim)


def _attend(rows: Array, positions: Array, kv_lens: Array, table: Array, pages: Pages, rules: Rules, sink) -> Array:
    """Rows over the pages of their sequences, block by block with a running softmax.

    Args:
        rows: [B, K, R, D] float32.
        positions: [B, R] int32, -1 where a row counts for nothing.
        kv_lens: [B] int32.
        table: [B, W] int32.
        sink: [K, R] float32 or None.

    Returns:
        [B, K, R, D] float32.
    """
    batch, heads, count, dim = rows.shape
    fits = BLOCK_ELEMENTS // (batch * heads * dim * pages.size)
    per_block = max(1, min(table.shape[1], fits, -(-512 // pages.size)))
    span = per_block * pages.size
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % per_block)), constant_values=-1)
    live = positions >= 0
    end = jnp.where(live.any(1), jnp.where(rules.causal, positions.max(1) + 1, kv_lens), 0).max()
    first = jnp.int32(0)
    if rules.window is not None:
        nearest = jnp.where(live, positions, jnp.iinfo(jnp.int32).max).min()
        first = jnp.clip(nearest - rules.window + 1, 0, table.shape[1] * pages.size) // span

    def body(block, carry):
        high, total, out = carry
        keys, values = pages.read(lax.dynamic_slice_in_dim(table, block * per_block, per_block, axis=1))
        scores = jnp.einsum("bkrd,bksd->bkrs", rows, keys.astype(jnp.float32)) * rules.scale
        if rules.soft_cap is not None:
            scores = rules.soft_cap * jnp.tanh(scores / rules.soft_cap)
        column = block * span + jnp.arange(span)
        seen = (column < kv_lens[:, None])[:, None] & live[:, :, None]
        if rules.causal:
            seen &= column <= positions[:, :, None]
        if rules.window is not None:
            seen &= column > positions[:, :, None] - rules.window
        scores = jnp.where(seen[:, None], scores, MASKED)
        higher = jnp.maximum(high, scores.max(-1, keepdims=True))
        weights = jnp.where(seen[:, None], jnp.exp(scores - higher), 0.0)
        shrink = jnp.exp(high - higher)
        added = jnp.einsum("bkrs,bksd->bkrd", weights, values.astype(jnp.float32))
        return higher, total * shrink + weights.sum(-1, keepdims=True), out * shrink + added

    high = jnp.full((batch, heads, count, 1), MASKED, jnp.float32)
    total = jnp.zeros_like(high)
    if sink is not None:
        high, total = jnp.broadcast_to(sink[None, :, :, None], high.shape), jnp.ones_like(high)
    blocks = jnp.minimum(-(-end // span), table.shape[1] // per_block)
    _, total, out = lax.fori_loop(first, blocks, body, (high, total, jnp.zeros(rows.shape, jnp.float32)))
    return out / jnp.where(total > 0, total, 1.0) * rules.value_scale


def _composed_decode(q: Array, pages: Pages, batch: Batch, rules: Rules, sink: Array | None) -> Array:
    """The sequences of one new token, all at once; zeros for every other token."""
    total = q.shape[0]
    picked, position, tokens = decode_rows(q, batch)
    rows = _grouped(picked[:, None], pages.kv_heads)
    positions = jnp.broadcast_to(position[:, None], (position.shape[0], rows.shape[2]))
    by_row = None if sink is None else sink.astype(jnp.float32).reshape(pages.kv_heads, -1)
    out = _attend(rows, positions, batch.kv_lens, batch.live_pages(pages.size), pages, rules, by_row)
    return scattered(_ungrouped(out, 1)[:, 0], tokens, total)


def decode_rows(q: Array, batch: Batch) -> tuple[Array, Array, Array]:
    """The sequences of one new token: their rows [S, H, D], positions (-1 for others) and tokens (T for others) [S]."""
    total, decode = q.shape[0], batch.new == 1
    token = jnp.where(decode, batch.starts[:-1], total)
    return q[jnp.clip(token, 0, total - 1)], jnp.where(decode, batch.kv_lens - 1, -1), token


def scattered(rows: Array, tokens: Array, total: int) -> Array:
    """[T, H, D] float32 with rows [S, H, D] at their tokens, zeros elsewhere."""
    return jnp.zeros((total, *rows.shape[1:]), jnp.float32).at[tokens].set(rows.astype(jnp.float32), mode="drop")


def _each_prefill(batch: Batch, rows: int, aligned: bool, out: Array, step: Callable) -> Array:
    """out after step(sequence, first position, out) for each chunk of `rows` of each sequence of several new tokens.

    Chunks begin at the sequence's first new position or, if `aligned`, at a multiple of `rows`.
    """

    def sequence(index, out):
        new, length = batch.new[index], batch.kv_lens[index]
        first = length - new
        if aligned:
            first = first // rows * rows
        chunks = jnp.where(new > 1, -(-(length - first) // rows), 0)
        return lax.fori_loop(0, chunks, lambda chunk, out: step(index, first + chunk * rows, out), out)

    return lax.fori_loop(0, jnp.minimum(batch.count, batch.kv_lens.shape[0]), sequence, out)


def _chunk(batch: Batch, index: Array, first: Array, rows: int, total: int) -> tuple[Array, Array]:
    """Positions of a chunk's rows, -1 where there is no new token, and the tokens that they are; each [rows]."""
    new, length = batch.new[index], batch.kv_lens[index]
    position = first + jnp.arange(rows)
    there = (position >= length - new) & (position < length)
    token = batch.starts[index] + position - (length - new)
    return jnp.where(there, position, -1), jnp.where(there, token, total)


def _composed_prefill(q: Array, pages: Pages, batch: Batch, rules: Rules, sink: Array | None, out: Array) -> Array:
    total, heads, _ = q.shape
    rows = min(CHUNK, total)
    if total == 1:
        return out
    table, by_row = batch.live_pages(pages.size), None
    if sink is not None:
        by_row = jnp.repeat(sink.astype(jnp.float32).reshape(pages.kv_heads, -1), rows, axis=1)

    def step(index, first, out):
        position, token = _chunk(batch, index, first, rows, total)
        grouped = _grouped(q[jnp.clip(token, 0, total - 1)][None], pages.kv_heads)
        positions = jnp.tile(position, heads // pages.kv_heads)[None]
        part = _attend(grouped, positions, batch.kv_lens[index][None], table[index][None], pages, rules, by_row)
        return out.at[token].set(_ungrouped(part, rows)[0], mode="drop")

    return _each_prefill(batch, rows, False, out, step)


def fits_calls(q: Array, pages: Pages, rules: Rules, sink: Array | None) -> bool:
    """Whether the `tt.*` calls can compute the whole batch."""
    plain = rules.soft_cap is None and rules.causal and rules.window is None and sink is None
    return (
        plain
        and rules.value_scale == 1.0
        and pages.size in tt.PAGE_SIZES
        and pages.dim in tt.HEAD_DIMS
        and pages.data.dtype in tt.FLOATS
        and q.dtype in tt.FLOATS
    )


def by_calls(q: Array, pages: Pages, batch: Batch, rules: Rules) -> Array:
    """The same as `composed` through paged decode and chunked prefill, for what they can compute.

    The batch's pages are laid out anew for them, all pages or those of the table, whichever are fewer.
    """
    total, _, _ = q.shape
    table = _padded(batch.live_pages(pages.size))
    if table.size < pages.data.shape[0]:
        k_cache, v_cache = pages.apart(table.reshape(-1))
        table = jnp.where(table >= 0, jnp.arange(table.size, dtype=jnp.int32).reshape(table.shape), -1)
    else:
        k_cache, v_cache = pages.apart(jnp.arange(pages.data.shape[0]))
    rows, position, token = decode_rows(q, batch)
    decoded = tt.paged_attention_decode(rows[None], k_cache, v_cache, table, position, scale=rules.scale)
    out = scattered(decoded[0], token, total)
    if total == 1:
        return out
    size = min(CHUNK, -(-total // tt.TILE) * tt.TILE)

    def step(index, first, out):
        _, token = _chunk(batch, index, first, size, total)
        chunk = q[jnp.clip(token, 0, total - 1)].swapaxes(0, 1)[None]
        part = tt.chunked_attention(chunk, k_cache, v_cache, table[index][None], first[None], scale=rules.scale)
        return out.at[token].set(part[0].swapaxes(0, 1).astype(jnp.float32), mode="drop")

    return _each_prefill(batch, size, True, out, step)


def _padded(table: Array) -> Array:
    """A page table as wide as the calls want it."""
    return jnp.pad(table, ((0, 0), (0, -table.shape[1] % tt.TABLE_MULTIPLE)), constant_values=-1)


def attend(q: Array, pages: Pages, batch: Batch, rules: Rules, sink: Array | None = None) -> Array:
    """Attention of every token of the batch, [T, H, D] float32, by calls where they fit and composed otherwise."""
    if not fits_calls(q, pages, rules, sink):
        return composed(q, pages, batch, rules, sink)
    arrays = (q, pages.data, batch.kv_lens, batch.page_table, batch.starts, batch.count)
    static = {"kv_heads": pages.kv_heads, "dim": pages.dim, "layout": pages.layout, "scale": float(rules.scale)}
    return jax.lax.composite(functools.partial(_on_arrays, by_calls), COMPOSITE)(*arrays, **static)


def _on_arrays(attention: Callable, q, data, kv_lens, page_table, starts, count, *, kv_heads, dim, layout, scale):
    """`by_calls` or `composed` of what a composite carries: arrays and plain attributes."""
    batch = Batch(kv_lens, page_table, starts, count)
    return attention(q, Pages(data, int(kv_heads), int(dim), str(layout)), batch, Rules(float(scale)))


# What the composite computes, by reading the pages where they are.
composed_on_arrays = functools.partial(_on_arrays, composed)
