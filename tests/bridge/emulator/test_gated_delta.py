"""The gated delta rule and its convolution, against their formulas in float64, token by token."""

import ml_dtypes
import numpy as np
import pytest

from kernels_replacements import tt_calls

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)


def rule(q, k, v, gate, beta, state):
    """One head in float64: q, k [T, K]; v [T, V]; gate, beta [T]; state [K, V]."""
    state, out = state.copy(), []
    for t in range(len(q)):
        state *= np.exp(gate[t])
        state += np.outer(k[t], beta[t] * (v[t] - state.T @ k[t]))
        out.append(state.T @ q[t])
    return state, np.array(out)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize(("dtype", "tolerance"), ((F32, 2e-4), (BF16, 2e-2)), ids=str)
@pytest.mark.parametrize("tokens", (1, 5, 70))
def test_rule(on_chip, tokens, dtype, tolerance):
    """State and outputs of every head follow the recurrence."""
    rng = np.random.default_rng(0)
    batch, heads, dim = 2, 3, 128
    q, k = (unit(rng.standard_normal((batch, tokens, heads, dim))).astype(dtype) for _ in range(2))
    v = rng.standard_normal((batch, tokens, heads, dim)).astype(dtype)
    gate = -rng.random((batch, tokens, heads)).astype(F32)
    beta = rng.random((batch, tokens, heads)).astype(F32)
    state = rng.standard_normal((batch, heads, dim, dim)).astype(F32)
    new, out = on_chip(tt_calls.gated_delta_rule, q, k, v, gate, beta, state)
    for b in range(batch):
        for h in range(heads):
            inputs = [x[b, :, h].astype(np.float64) for x in (q, k, v, gate, beta)]
            expected_state, expected = rule(*inputs, state[b, h].astype(np.float64))
            np.testing.assert_allclose(out[b, :, h].astype(np.float64), expected, atol=tolerance * np.abs(expected).max())
            np.testing.assert_allclose(new[b, h], expected_state, atol=2e-4 * np.abs(expected_state).max())


@pytest.mark.parametrize("key_heads", (1, 2, 4))
def test_decode_on_slots(on_chip, key_heads):
    """Slots hold the states; slot 0 is never written, and a request that begins sees zeros."""
    rng = np.random.default_rng(1)
    slots, heads, dim, batch = 6, 4, 128, 3
    state = rng.standard_normal((slots, heads, dim, dim)).astype(F32)
    qkv = rng.standard_normal((batch, (2 * key_heads + heads) * dim)).astype(F32)
    b, a = (rng.standard_normal((batch, heads)).astype(F32) for _ in range(2))
    a_log, dt_bias = (rng.standard_normal(heads).astype(F32) for _ in range(2))
    indices, initial = np.array([4, 0, 2], np.int32), np.array([1, 1, 0], np.int32)
    new, out = on_chip(tt_calls.gated_delta_decode, state, qkv, b, a, a_log, dt_bias, indices, initial)
    expected_state = state.copy()
    parts = qkv.astype(np.float64).reshape(batch, -1, dim)
    for i in range(batch):
        for h in range(heads):
            source = h // (heads // key_heads)
            q, k = unit(parts[i, source]) * dim**-0.5, unit(parts[i, key_heads + source])
            gate = -np.exp(a_log[h]) * np.log1p(np.exp(np.float64(a[i, h]) + dt_bias[h]))
            beta = 1 / (1 + np.exp(-np.float64(b[i, h])))
            before = state[indices[i], h].astype(np.float64) * initial[i]
            after, row = rule(q[None], k[None], parts[i, 2 * key_heads + h][None], [gate], [beta], before)
            np.testing.assert_allclose(out.reshape(batch, heads, dim)[i, h], row[0], atol=1e-3)
            if indices[i] > 0:
                expected_state[indices[i], h] = after
    np.testing.assert_allclose(new, expected_state, atol=1e-3)


@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
def test_convolution_update(on_chip, dtype):
    """The window moves on by one input, and the output is its weighted sum."""
    rng = np.random.default_rng(2)
    state = rng.standard_normal((5, 6, 3)).astype(dtype)
    value = rng.standard_normal((3, 6)).astype(dtype)
    weight = rng.standard_normal((6, 4)).astype(dtype)
    indices, initial = np.array([2, 0, 4], np.int32), np.array([1, 1, 0], np.int32)
    new, out = on_chip(tt_calls.causal_conv1d_update, state, value, weight, indices, initial)
    expected = state.copy()
    for i, slot in enumerate(indices):
        before = state[slot] if initial[i] else np.zeros_like(state[slot])
        window = np.concatenate([before, value[i][:, None]], 1)
        total = (window.astype(np.float64) * weight.astype(np.float64)).sum(-1)
        np.testing.assert_allclose(out[i].astype(np.float64), total, atol=2e-2 if dtype == BF16 else 1e-5)
        if slot > 0:
            expected[slot] = window[:, 1:]
    np.testing.assert_array_equal(new, expected)
