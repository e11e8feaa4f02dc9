"""The gated delta rule's replacements against a token-by-token float64 recurrence."""

import functools

import ml_dtypes
import numpy as np
import pytest

from kernels_replacements import gated_delta as ours

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
TAPS = 4


def error(got, expected):
    """Largest difference relative to the largest value."""
    got, expected = np.asarray(got).astype(np.float64), np.asarray(expected)
    assert np.isfinite(got).all()
    return np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-9)


class Sequences:
    """A ragged batch with states in shuffled slots; `fresh` sequences begin anew, the others go on."""

    def __init__(self, new, fresh, *, key_heads=1, heads=2, dim=128, dtype=F32):
        rng = np.random.default_rng(0)
        self.new, self.fresh, self.heads, self.key_heads, self.dim = new, fresh, heads, key_heads, dim
        self.columns = (2 * key_heads + heads) * dim
        total, spare = sum(new) + 2, 1
        self.qkv = rng.standard_normal((total, self.columns)).astype(dtype)
        self.b, self.a = (rng.standard_normal((total, heads)).astype(dtype) for _ in range(2))
        self.conv = rng.standard_normal((7, TAPS - 1, self.columns)).astype(dtype)
        self.state = (rng.standard_normal((7, heads, dim, dim)) * 0.1).astype(F32)
        self.weight = rng.standard_normal((self.columns, 1, TAPS)).astype(F32)
        self.bias = rng.standard_normal(self.columns).astype(F32)
        self.a_log, self.dt_bias = (rng.standard_normal(heads).astype(F32) for _ in range(2))
        self.slots = np.array([5, 2, 6, 1, 4][: len(new)] + [0] * spare, np.int32)
        self.starts = np.array([0, *np.cumsum(new), *[sum(new)] * spare], np.int32)
        self.lengths = np.array([n if f else n + 9 for n, f in zip(new, fresh, strict=True)] + [0] * spare, np.int32)
        decodes = sum(1 for n in new if n == 1)
        self.distribution = np.array([decodes, decodes, len(new)], np.int32)

    def convolved(self, sequence):
        """Activations [new, columns] and the window that is left, in float64."""
        rows = self.qkv[self.starts[sequence] : self.starts[sequence + 1]].astype(np.float64)
        window = self.conv[self.slots[sequence]].astype(np.float64) * (not self.fresh[sequence])
        window = np.concatenate([window, rows])
        weight = self.weight[:, 0].astype(np.float64).T
        out = np.stack([(window[t : t + TAPS] * weight).sum(0) for t in range(len(rows))]) + self.bias
        return out, window[-(TAPS - 1) :]

    def expected(self):
        """(windows, states, out) in float64."""
        windows, states = self.conv.astype(np.float64), self.state.astype(np.float64)
        out = np.zeros((len(self.qkv), self.heads * self.dim))
        for sequence, slot in enumerate(self.slots[: len(self.new)]):
            x, windows[slot] = self.convolved(sequence)
            x = x / (1 + np.exp(-x))
            state = states[slot] * (not self.fresh[sequence])
            parts = x.reshape(len(x), -1, self.dim)
            unit = lambda u: u / np.sqrt((u * u).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
            group = self.heads // self.key_heads
            q = np.repeat(unit(parts[:, : self.key_heads]), group, 1) * self.dim**-0.5
            k = np.repeat(unit(parts[:, self.key_heads : 2 * self.key_heads]), group, 1)
            v = parts[:, 2 * self.key_heads :]
            for t in range(len(x)):
                at = self.starts[sequence] + t
                beta = 1 / (1 + np.exp(-self.b[at].astype(np.float64)))
                gate = -np.exp(self.a_log) * np.log1p(np.exp(self.a[at].astype(np.float64) + self.dt_bias))
                state = state * np.exp(gate)[:, None, None]
                known = np.einsum("hkv,hk->hv", state, k[t])
                state = state + k[t][:, :, None] * (beta[:, None] * (v[t] - known))[:, None]
                out[at] = np.einsum("hkv,hk->hv", state, q[t]).reshape(-1)
            states[slot] = state
        return windows, states, out

    def arguments(self):
        return (
            self.qkv, self.b, self.a, self.conv, self.state, self.weight, self.bias, self.a_log, self.dt_bias,
            self.starts, self.slots, self.distribution, self.lengths,
        )  # fmt: skip

    def options(self):
        return {"n_kq": self.key_heads, "n_v": self.heads, "d_k": self.dim, "d_v": self.dim, "kernel_size": TAPS}


BATCHES = {
    "decode": ([1, 1, 1], [False, True, False]),
    "prefill": ([9, 70], [True, False]),
    "mixed": ([1, 5, 1, 2], [False, True, False, False]),
}


@pytest.mark.parametrize("form", BATCHES)
def test_fused_conv1d_gdn_by_calls(on_chip, form):
    """Decodes, prefills longer than a chunk, and both: outputs, windows and states; other slots stay."""
    batch = Sequences(*BATCHES[form])
    windows, states, out = batch.expected()
    got = on_chip(functools.partial(ours.fused_conv1d_gdn, **batch.options()), *batch.arguments())
    for mine, expected in zip(got, (windows, states, out), strict=True):
        assert error(mine, expected) < 1e-4
    assert (got[0][3] == batch.conv[3]).all() and (got[1][3] == batch.state[3]).all()


def test_other_head_sizes_are_composed():
    """Heads of 32, which the calls do not take, in bfloat16: the same recurrence."""
    batch = Sequences(*BATCHES["mixed"], dim=32, dtype=BF16)
    windows, states, out = batch.expected()
    (mine_windows, mine_states), mine = ours.fused_conv1d_gdn(*batch.arguments(), **batch.options())
    assert error(mine, out) < 2e-2 and error(mine_states, states) < 1e-4 and error(mine_windows, windows) < 1e-6


def test_states_read_elsewhere_than_written(on_chip):
    """tpu_inference's form: a sequence goes on from one slot and leaves its state in another."""
    batch = Sequences([1, 1], [False, False])
    read = batch.slots.copy()
    batch.slots[:2] = [1, 3]
    moved = Sequences([1, 1], [False, False])
    windows, states, out = moved.expected()
    run = functools.partial(ours.fused_conv1d_gdn_inference, **batch.options())
    got = on_chip(run, *batch.arguments(), read)
    assert error(got[2], out) < 1e-4
    assert error(got[1][[1, 3]], states[read[:2]]) < 1e-4 and error(got[0][[1, 3]], windows[read[:2]]) < 1e-5


def test_states_in_a_pool_of_blocks():
    """The pooled form gives what the dense one gives, and leaves in the pool what the next step goes on from."""
    import dataclasses

    import jax.numpy as jnp

    @dataclasses.dataclass(frozen=True)
    class Region:
        kb0: int
        nblocks: int
        row0: int
        nrows: int
        view_dtype: str

    @dataclasses.dataclass(frozen=True)
    class Plan:
        stride: int
        conv: Region
        recurrent: Region

    batch = Sequences([1, 5], [True, True], dim=16)
    lanes, rows = 128, 8
    conv = -(-(TAPS - 1) * batch.columns // (rows * lanes))
    states = -(-batch.heads * 16 * 16 // (rows * lanes))
    plan = Plan(conv + states, Region(0, conv, 0, rows, "float32"), Region(conv, states, 0, rows, "float32"))
    pool = jnp.zeros((7 * (conv + states), rows, lanes), jnp.float32)
    _, expected_states, out = batch.expected()
    arguments = list(batch.arguments())
    arguments[3] = arguments[4] = None
    source, mine = ours.fused_conv1d_gdn(*arguments, **batch.options(), state_source=pool, state_plan=plan)
    assert error(mine, out) < 1e-4
    held = ours._Pool(source, plan).read(plan.recurrent, jnp.asarray(batch.slots), (batch.heads, 16, 16))
    assert error(held[:2], expected_states[batch.slots[:2]]) < 1e-4


def test_ragged_causal_conv1d():
    """The convolution alone, with and without a window to go on from."""
    batch = Sequences(*BATCHES["mixed"], dim=16)
    initial = np.array([not f for f in batch.fresh] + [False], np.int32)
    out, windows = ours.ragged_causal_conv1d(
        batch.qkv, batch.conv, batch.weight, batch.bias, batch.starts, batch.slots, batch.distribution, initial,
        kernel_size=TAPS,
    )  # fmt: skip
    for sequence in range(len(batch.new)):
        expected, left = batch.convolved(sequence)
        assert error(out[batch.starts[sequence] : batch.starts[sequence + 1]], expected) < 1e-5
        assert error(windows[batch.slots[sequence]], left) < 1e-6


def test_what_is_not_replaced_says_so():
    """Speculative tokens are left to the original."""
    from kernels_replacements.errors import NotReplaced

    batch = Sequences([1], [True], dim=16)
    with pytest.raises(NotReplaced, match="speculative"):
        ours.fused_conv1d_gdn(*batch.arguments(), **batch.options(), num_spec_tokens=2)
