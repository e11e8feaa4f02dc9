"""The gated delta rule with its causal convolution, of ragged batches, as vllm_torchtpu and tpu_inference call it.

Decodes go to `tt.gated_delta_decode` and prefills to `tt.gated_delta_rule`, chunk by chunk,
where heads are of 128 and states float32; other sizes are the same recurrence in plain JAX.
The convolution, whose windows are kept in another layout than TTNN's, is plain JAX.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_replacements import tt_calls as tt
from kernels_replacements.errors import KernelError, NotReplaced
from kernels_replacements.ragged_attention import Batch

Array = jax.Array

CHUNK = 64
EPSILON = 1e-6  # of the l2 norm of queries and keys


def _require(condition: bool, kernel: str, message: str) -> None:
    if not condition:
        raise KernelError(f"{kernel}: {message}")


# ---- The convolution


def _convolve(x: Array, state: Array, weight: Array, bias: Array | None, batch: Batch, slots: Array, begins: Array):
    """Every token's window times the weights, and the windows that are left behind.

    Args:
        x: [T, C] float32.
        state: [slots, L-1, C], the last inputs of each slot.
        weight: [C, 1, L]; bias: [C] or None.
        slots: [S] int32; begins: [S] bool, where a slot counts as zeros.

    Returns:
        (out [T, C] float32, zeros for tokens of no sequence; windows [S, L-1, C] float32).
    """
    total, (kernel, taps) = x.shape[0], (weight.shape[2], weight.shape[2] - 1)
    sequence, _, there = batch.tokens(total)
    held = jnp.where(begins[:, None, None], 0, state[jnp.clip(slots, 0, state.shape[0] - 1)]).astype(jnp.float32)
    offset = jnp.arange(total) - batch.starts[sequence]

    def input_at(sequence, offset):
        """The input `offset` tokens after the sequence's first new one; before it, from its window."""
        new = x[jnp.clip(batch.starts[sequence] + offset, 0, total - 1)]
        old = held[sequence, jnp.clip(taps + offset, 0, taps - 1)]
        return jnp.where((offset >= 0)[:, None], new, old)

    out = jnp.zeros_like(x) if bias is None else jnp.broadcast_to(bias.astype(jnp.float32), x.shape)
    for tap in range(kernel):
        out = out + input_at(sequence, offset + tap - taps) * weight[:, 0, tap].astype(jnp.float32)
    every = jnp.arange(slots.shape[0])
    left = jnp.stack([input_at(every, batch.new + tap - taps) for tap in range(taps)], 1)
    return jnp.where(there[:, None], out, 0), left


def _write(pool: Array, slots: Array, rows: Array, live: Array) -> Array:
    """The pool with rows [S, …] in their slots, where `live`."""
    slots = jnp.where(live & (slots >= 0), slots, pool.shape[0])
    return pool.at[slots].set(rows.astype(pool.dtype), mode="drop")


@functools.partial(jax.jit, static_argnames=("kernel_size", "tile_size"), donate_argnames=("conv_state",))
def ragged_causal_conv1d(
    x: Array, conv_state: Array, conv_weight: Array, conv_bias: Array | None, query_start_loc: Array,
    state_indices: Array, distribution: Array, has_initial_state: Array, *, kernel_size: int, tile_size: int = 64,
) -> tuple[Array, Array]:  # fmt: skip
    """A causal depthwise convolution of several sequences, whose last inputs are kept in slots.

    Args:
        x: [T, C]; conv_state: [slots, L-1, C]; conv_weight: [C, 1, L]; conv_bias: [C] or None.
        query_start_loc: [S+1]; state_indices: [S]; distribution: [3]; has_initial_state: [S].

    Returns:
        (out [T, C] in x's dtype, the slots).
    """
    kernel = "ragged_causal_conv1d"
    _require(conv_weight.shape == (x.shape[1], 1, kernel_size), kernel, f"conv_weight {conv_weight.shape} does not fit x {x.shape}")  # fmt: skip
    sequences = state_indices.shape[0]
    lengths = query_start_loc[1:] - query_start_loc[:-1]
    batch = Batch(lengths, jnp.zeros((sequences, 1), jnp.int32), query_start_loc, distribution[2])
    windows = conv_state.reshape(conv_state.shape[0], kernel_size - 1, -1)
    out, left = _convolve(
        x.astype(jnp.float32), windows, conv_weight, conv_bias, batch, state_indices, has_initial_state == 0
    )
    windows = _write(windows, state_indices, left, batch.new > 0)
    return out.astype(x.dtype), windows.reshape(conv_state.shape)


# ---- The rule


@dataclass(frozen=True)
class Heads:
    """How the columns of the convolved inputs are split: Hk heads of queries and of keys, H of values."""

    key: int
    value: int
    key_dim: int
    value_dim: int

    def split(self, x: Array) -> tuple[Array, Array, Array]:
        """Normalised and scaled queries, normalised keys [T, H, K], values [T, H, V]."""
        width = self.key * self.key_dim
        q, k = (x[:, i * width : (i + 1) * width].reshape(-1, self.key, self.key_dim) for i in (0, 1))
        q, k = (jnp.repeat(_unit(part), self.value // self.key, axis=1) for part in (q, k))
        return q * self.key_dim**-0.5, k, x[:, 2 * width :].reshape(-1, self.value, self.value_dim)


def _unit(x: Array) -> Array:
    return x * lax.rsqrt((x * x).sum(-1, keepdims=True) + EPSILON)


def _step(state, q, k, v, gate, beta):
    """One token: state [..., K, V]; q, k [..., K]; v [..., V]; gate, beta [...]."""
    state = state * jnp.exp(gate)[..., None, None]
    known = (state * k[..., None]).sum(-2)
    state = state + k[..., None] * (beta[..., None] * (v - known))[..., None, :]
    return state, (state * q[..., None]).sum(-2)


def _rule(q, k, v, gate, beta, state):
    """A chunk of tokens [T, H, …] through the rule: (state [H, K, V], out [T, H, V])."""
    if q.shape[2] == v.shape[2] == tt.STATE_DIM:
        one = (x[None] for x in (q, k, v, gate, beta, state))
        state, out = tt.gated_delta_rule(*one)
        return state[0], out[0]
    return lax.scan(lambda carry, x: _step(carry, *x), state, (q, k, v, gate, beta))


def _recur(x, b, a, a_log, dt_bias, state, heads: Heads, batch: Batch, slots: Array, begins: Array):
    """All tokens through the rule: (state [slots, H, K, V], out [T, H*V] float32).

    Args:
        x: [T, 2 Hk K + H V] float32, convolved and activated; b, a: [T, H].
    """
    total, sequences = x.shape[0], slots.shape[0]
    beta = jax.nn.sigmoid(b.astype(jnp.float32))
    gate = -jnp.exp(a_log.astype(jnp.float32)) * jax.nn.softplus(a.astype(jnp.float32) + dt_bias.astype(jnp.float32))
    decode = batch.new == 1
    token = jnp.where(decode, batch.starts[:-1], total)
    picked = jnp.clip(token, 0, total - 1)
    fits = heads.key_dim == heads.value_dim == tt.STATE_DIM and state.dtype == jnp.float32
    if fits:
        # Slot 0 is padding for the call: sequences that do not decode now go there.
        where = jnp.where(decode, slots, 0).astype(jnp.int32)
        state, one = tt.gated_delta_decode(
            state, x[picked], b.astype(jnp.float32)[picked], a.astype(jnp.float32)[picked],
            a_log.astype(jnp.float32), dt_bias.astype(jnp.float32), where, (~begins).astype(jnp.int32),
        )  # fmt: skip
    else:
        held = jnp.where(begins[:, None, None, None], 0, state[jnp.clip(slots, 0, state.shape[0] - 1)])
        new, one = _step(held.astype(jnp.float32), *(p[picked] for p in (*heads.split(x), gate, beta)))
        state, one = _write(state, slots, new, decode), one.reshape(sequences, -1)
    out = jnp.zeros((total, heads.value * heads.value_dim), jnp.float32).at[token].set(one, mode="drop")
    if total == 1:
        return state, out
    rows = min(CHUNK, total)

    def sequence(index, carry):
        def chunk(number, carry):
            state, out, held = carry
            offset = number * rows + jnp.arange(rows)
            there = offset < batch.new[index]
            at = jnp.where(there, batch.starts[index] + offset, total)
            inside = jnp.clip(at, 0, total - 1)
            # A row that is none has no decay and no weight, and changes nothing.
            masked = (jnp.where(there[:, None], part[inside], 0) for part in (gate, beta))
            held, part = _rule(*(p for p in heads.split(x[inside])), *masked, held)
            return state, out.at[at].set(part.reshape(rows, -1), mode="drop"), held

        state, out = carry
        slot = jnp.clip(slots[index], 0, state.shape[0] - 1)
        held = jnp.where(begins[index], 0, state[slot]).astype(jnp.float32)
        chunks = jnp.where(batch.new[index] > 1, -(-batch.new[index] // rows), 0)
        state, out, held = lax.fori_loop(0, chunks, chunk, (state, out, held))
        return _write(state, slots[index][None], held[None], (chunks > 0)[None]), out

    return lax.fori_loop(0, jnp.minimum(batch.count, sequences), sequence, (state, out))


def _conv_and_rule(
    kernel, qkv, b, a, conv_state, recurrent_state, conv_weight, conv_bias, a_log, dt_bias, query_start_loc,
    state_indices, distribution, seq_lens, heads: Heads,
):  # fmt: skip
    """((conv_state, recurrent_state), out [T, H*V] in qkv's dtype); a sequence whose tokens are all new begins anew."""
    dim, sequences = qkv.shape[1], state_indices.shape[0]
    _require(dim == 2 * heads.key * heads.key_dim + heads.value * heads.value_dim, kernel, f"qkv of {dim} columns does not hold {heads}")  # fmt: skip
    _require(query_start_loc.shape == (sequences + 1,) and distribution.shape == (3,), kernel, f"query_start_loc {query_start_loc.shape} does not fit {sequences} sequences")  # fmt: skip
    batch = Batch(seq_lens, jnp.zeros((sequences, 1), jnp.int32), query_start_loc, distribution[2])
    begins = seq_lens <= batch.new
    windows = conv_state.reshape(conv_state.shape[0], conv_weight.shape[2] - 1, dim)
    x, left = _convolve(qkv.astype(jnp.float32), windows, conv_weight, conv_bias, batch, state_indices, begins)
    windows = _write(windows, state_indices, left, batch.new > 0)
    recurrent_state, out = _recur(
        jax.nn.silu(x), b, a, a_log, dt_bias, recurrent_state, heads, batch, state_indices, begins
    )
    return (windows.reshape(conv_state.shape), recurrent_state), out.astype(qkv.dtype)


_STATIC = (
    "n_kq", "n_v", "d_k", "d_v", "kernel_size", "num_spec_tokens", "zero_initialize_out", "compute_precision",
    "decode_tile_size", "mixed_tile_size",
)  # fmt: skip


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames=("conv_state", "recurrent_state"))
def fused_conv1d_gdn_inference(
    qkv: Array, b: Array, a: Array, conv_state: Array, recurrent_state: Array, conv_weight: Array,
    conv_bias: Array | None, a_log: Array, dt_bias: Array, query_start_loc: Array, state_indices: Array,
    distribution: Array, seq_lens: Array, read_state_indices: Array, read_offsets: Array | None = None, *,
    n_kq: int, n_v: int, d_k: int, d_v: int, kernel_size: int, num_spec_tokens: int = 0,
    zero_initialize_out: bool = True, compute_precision: Any = jnp.float32.dtype, decode_tile_size: int = 4,
    mixed_tile_size: int = 64,
) -> tuple[tuple[Array, Array], Array]:  # fmt: skip
    """`fused_conv1d_gdn` as tpu_inference has it: states are read from read_state_indices [S], written to state_indices."""
    if num_spec_tokens:
        raise NotReplaced("speculative tokens are not replaced")
    live = jnp.arange(state_indices.shape[0]) < distribution[2]
    conv_state, recurrent_state = (
        _write(pool, state_indices, pool[read_state_indices], live) for pool in (conv_state, recurrent_state)
    )
    return _conv_and_rule(
        "fused_conv1d_gdn", qkv, b, a, conv_state, recurrent_state, conv_weight, conv_bias, a_log, dt_bias,
        query_start_loc, state_indices, distribution, seq_lens, Heads(n_kq, n_v, d_k, d_v),
    )  # fmt: skip


@functools.partial(
    jax.jit,
    static_argnames=(*_STATIC, "attention_mode", "gate_lower_bound", "state_plan", "batched_only", "prefill_only"),
    donate_argnames=("conv_state", "recurrent_state", "state_source"),
)
def fused_conv1d_gdn(
    qkv: Array, b: Array, a: Array, conv_state: Array | None, recurrent_state: Array | None, conv_weight: Array,
    conv_bias: Array | None, a_log: Array, dt_bias: Array, query_start_loc: Array, state_indices: Array,
    distribution: Array, seq_lens: Array, read_offsets: Array | None = None, ckpt_indices: Array | None = None, *,
    n_kq: int, n_v: int, d_k: int, d_v: int, kernel_size: int, attention_mode: Any = None,
    gate_lower_bound: float | None = None, state_source: Array | None = None, state_plan: Any = None,
    num_spec_tokens: int = 0, batched_only: bool = False, prefill_only: bool = False,
    zero_initialize_out: bool = True, compute_precision: Any = jnp.float32.dtype, decode_tile_size: int = 4,
    mixed_tile_size: int = 64,
) -> Any:  # fmt: skip
    """A causal convolution with SiLU and the gated delta rule after it, of several sequences.

    Args:
        qkv: [T, 2 n_kq d_k + n_v d_v]; b, a: [T, n_v].
        conv_state: [slots, L-1, C]; recurrent_state: [slots, n_v, d_k, d_v]; slot 0 is padding.
        conv_weight: [C, 1, L]; conv_bias: [C] or None; a_log, dt_bias: [n_v].
        query_start_loc: [S+1]; state_indices: [S]; distribution: [3]; seq_lens: [S]; int32.
        state_source, state_plan: a pool of blocks in place of both states, and where they are in it.

    Returns:
        ((conv_state, recurrent_state) or the pool, out [T, n_v d_v] in qkv's dtype).
    """
    plain = getattr(attention_mode, "name", "GDN") == "GDN" and gate_lower_bound is None
    if not plain or num_spec_tokens or batched_only or prefill_only:
        raise NotReplaced("KDA, bounded gates, speculative tokens and one-sided batches are not replaced")
    heads = Heads(n_kq, n_v, d_k, d_v)
    common = (conv_weight, conv_bias, a_log, dt_bias, query_start_loc)
    if state_plan is None:
        return _conv_and_rule(
            "fused_conv1d_gdn", qkv, b, a, conv_state, recurrent_state, *common, state_indices, distribution,
            seq_lens, heads,
        )  # fmt: skip
    sequences = state_indices.shape[0]
    pool = _Pool(state_source, state_plan)
    windows = pool.read(state_plan.conv, state_indices, (kernel_size - 1, qkv.shape[1]))
    states = pool.read(state_plan.recurrent, state_indices, (n_v, d_k, d_v))
    # One slot a sequence behind a padding slot, written back to where they came from.
    windows, states = (jnp.concatenate([jnp.zeros_like(x[:1]), x]) for x in (windows, states))
    (windows, states), out = _conv_and_rule(
        "fused_conv1d_gdn", qkv, b, a, windows, states, *common, jnp.arange(1, sequences + 1, dtype=jnp.int32),
        distribution, seq_lens, heads,
    )  # fmt: skip
    live = jnp.arange(sequences) < distribution[2]
    source = pool.write(state_plan.conv, state_indices, windows[1:], live)
    return _Pool(source, state_plan).write(state_plan.recurrent, state_indices, states[1:], live), out


@dataclass(frozen=True)
class _Pool:
    """States kept as ranges of rows in blocks of a shared pool [blocks, rows, …], as a copy plan says."""

    source: Array
    plan: Any

    def _blocks(self, region: Any, indices: Array) -> Array:
        return (indices * self.plan.stride + region.kb0)[:, None] + jnp.arange(region.nblocks)[None]

    def _dtype(self, region: Any) -> Any:
        # Words of 32 bits stand for pairs of bfloat16.
        return jnp.dtype(jnp.bfloat16) if jnp.dtype(region.view_dtype) == jnp.uint32 else jnp.dtype(region.view_dtype)

    def _raw(self, region: Any, indices: Array) -> Array:
        rows = slice(region.row0, region.row0 + region.nrows)
        return self.source[self._blocks(region, indices)][:, :, rows].reshape(indices.shape[0], -1)

    def read(self, region: Any, indices: Array, shape: tuple[int, ...]) -> Array:
        """[S, *shape] of a region."""
        raw, dtype = self._raw(region, indices), self._dtype(region)
        ratio = dtype.itemsize // self.source.dtype.itemsize
        values = lax.bitcast_convert_type(raw.reshape(raw.shape[0], -1, ratio) if ratio > 1 else raw, dtype)
        count = functools.reduce(lambda x, y: x * y, shape)
        return values.reshape(raw.shape[0], -1)[:, :count].reshape(-1, *shape)

    def write(self, region: Any, indices: Array, values: Array, live: Array) -> Array:
        """The pool with a region's values [S, …] written, where `live`."""
        raw, sequences = self._raw(region, indices), indices.shape[0]
        flat = values.reshape(sequences, -1).astype(self._dtype(region))
        flat = lax.bitcast_convert_type(flat, self.source.dtype).reshape(sequences, -1)
        raw = raw.at[:, : flat.shape[1]].set(flat)
        blocks = jnp.where(live[:, None], self._blocks(region, indices), self.source.shape[0])
        shape = (sequences, region.nblocks, region.nrows, *self.source.shape[2:])
        return self.source.at[blocks, region.row0 : region.row0 + region.nrows].set(raw.reshape(shape), mode="drop")
