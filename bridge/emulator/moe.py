"""What the calls of a mixture of experts compute on the emulated chip, in float32."""

import jax
import jax.numpy as jnp
from jax import lax


def _expert(x, w1, w3, w2):
    """w2(silu(w1 x) * w3 x) for x [R, C] and one expert's weights."""
    up = jax.nn.silu(x @ w1.astype(jnp.float32)) * (x @ w3.astype(jnp.float32))
    return up @ w2.astype(jnp.float32)


def fused_moe_ep(x, weights, ids, w1, w3, w2):
    """tt.fused_moe_ep: an expert that no token chose costs nothing."""
    tokens = x.astype(jnp.float32)

    def body(expert, total):
        share = jnp.where(ids == expert, weights, 0.0).sum(-1)

        def add(total):
            return total + share[:, None] * _expert(tokens, w1[expert], w3[expert], w2[expert])

        return lax.cond((ids == expert).any(), add, lambda total: total, total)

    total = lax.fori_loop(0, w1.shape[0], body, jnp.zeros(x.shape, jnp.float32))
    # An expert that this chip does not have is no token of its own part, but a fault of the caller's.
    total = jnp.where((ids >= w1.shape[0]).any(-1, keepdims=True), jnp.nan, total)
    return total.astype(x.dtype)


def sparse_matmul(a, b, sparsity, *, is_input_a_sparse, is_input_b_sparse, nnz=None):
    """tt.sparse_matmul, dense times sparse."""
    out = jnp.einsum("xymk,ekn->xyemn", a.astype(jnp.float32), b[0].astype(jnp.float32))
    marked = (sparsity[:, :, 0] != 0)[..., None, None]
    return jnp.where(marked, out, 0.0)[:, :, None].astype(a.dtype)
