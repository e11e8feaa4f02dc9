"""What the sampling call computes on the emulated chip."""

import jax
import jax.numpy as jnp


def sampling(values, indices, k, p, temperature, *, seed):
    """tt.sampling: top k, then top p of what is left, at a temperature; k of 1 is the largest."""
    batch, count = values.shape
    # The larger value first, of equal ones the earlier candidate.
    order = jnp.argsort(-values.astype(jnp.float32), axis=1, stable=True)
    scores = jnp.take_along_axis(values.astype(jnp.float32), order, axis=1) / temperature[:, None]
    rank = jnp.arange(count)[None]
    scores = jnp.where(rank < k[:, None], scores, -jnp.inf)
    probabilities = jax.nn.softmax(scores, axis=1)
    before = jnp.cumsum(probabilities, axis=1) - probabilities
    scores = jnp.where((before < p[:, None]) | (rank == 0), scores, -jnp.inf)
    noise = jax.random.gumbel(jax.random.key(seed), (batch, count), jnp.float32)
    choice = jnp.argmax(scores + noise, axis=1)
    chosen = jnp.take_along_axis(order, choice[:, None], axis=1)
    return jnp.take_along_axis(indices, chosen, axis=1)[:, 0]
