"""What the gated delta rule's calls compute on the emulated chip, in float32."""

import jax
import jax.numpy as jnp
from jax import lax

from bridge.emulator.cache import write_slots

EPSILON = 1e-6  # of the l2 norm of queries and keys, as in the models that use the rule


def _step(state, q, k, v, gate, beta):
    """One token: state [B, H, K, V]; q, k [B, H, K]; v [B, H, V]; gate, beta [B, H]."""
    state = state * jnp.exp(gate)[..., None, None]
    known = (state * k[..., None]).sum(-2)
    state = state + k[..., None] * (beta[..., None] * (v - known))[..., None, :]
    return state, (state * q[..., None]).sum(-2)


def gated_delta_rule(q, k, v, gate, beta, state):
    """tt.gated_delta_rule."""
    inputs = [jnp.moveaxis(x.astype(jnp.float32), 1, 0) for x in (q, k, v, gate, beta)]
    state, out = lax.scan(lambda carry, x: _step(carry, *x), state, inputs)
    return state, jnp.moveaxis(out, 0, 1).astype(q.dtype)


def _unit(x):
    return x * lax.rsqrt((x * x).sum(-1, keepdims=True) + EPSILON)


def gated_delta_decode(state, qkv, b, a, a_log, dt_bias, indices, initial):
    """tt.gated_delta_decode."""
    slots, heads, dim, _ = state.shape
    batch = qkv.shape[0]
    parts = qkv.astype(jnp.float32).reshape(batch, -1, dim)
    key_heads = (parts.shape[1] - heads) // 2
    q, k, v = parts[:, :key_heads], parts[:, key_heads : 2 * key_heads], parts[:, 2 * key_heads :]
    q, k = (jnp.repeat(_unit(x), heads // key_heads, axis=1) for x in (q, k))
    beta = jax.nn.sigmoid(b.astype(jnp.float32))
    gate = -jnp.exp(a_log) * jax.nn.softplus(a.astype(jnp.float32) + dt_bias)
    held = state[jnp.clip(indices, 0, slots - 1)] * (initial != 0)[:, None, None, None]
    new, out = _step(held, q * dim**-0.5, k, v, gate, beta)
    return write_slots(state, indices, new), out.reshape(batch, -1)


def causal_conv1d_update(state, value, weight, indices, initial):
    """tt.causal_conv1d_update."""
    held = state[jnp.clip(indices, 0, state.shape[0] - 1)]
    held = jnp.where((initial != 0)[:, None, None], held, 0).astype(state.dtype)
    window = jnp.concatenate([held, value[:, :, None]], axis=2)
    out = (window.astype(jnp.float32) * weight.astype(jnp.float32)).sum(-1)
    return write_slots(state, indices, window[:, :, 1:]), out.astype(value.dtype)
