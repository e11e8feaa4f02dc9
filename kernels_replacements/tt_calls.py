"""The `tt.*` custom calls that libtt knows, as typed JAX functions: the one place that spells them.

Each function checks its arguments against what TTNN's kernel takes and emits one
`stablehlo.custom_call`. libtt gives the call silicon; on the emulated chip
bridge/emulator gives it its meaning. Source of names, operands and limits: libtt
0.1.3, compiled against in mock mode.

Shapes use B requests, T tokens, H query heads, K key/value heads, D head
dimension, N pages of P positions, W pages a table row.
"""


import jax
import jax.numpy as jnp
import numpy as np

from kernels_replacements.errors import KernelError
from kernels_replacements.registry import used

PAGE_SIZES = (32, 64, 128)  # 16 has corrupted silently on hardware
HEAD_DIMS = (64, 96, 128, 256)
TABLE_MULTIPLE = 8  # a row of a page table is read in blocks of 8 int32
TILE = 32
STATE_DIM = 128  # of the gated delta kernels' key and value heads
FLOATS = (jnp.float32, jnp.bfloat16)
WEIGHT_DTYPES = ("bf16", "bfp_bf8", "bfp_bf4")

Array = jax.Array


def _require(condition: bool, kernel: str, message: str) -> None:
    if not condition:
        raise KernelError(f"{kernel}: {message}")


def _check_rank(kernel: str, **arrays: tuple[Array, int]) -> None:
    for name, (array, rank) in arrays.items():
        _require(array.ndim == rank, kernel, f"{name} has shape {array.shape}; {rank} dimensions are needed")


def _check_dtype(kernel: str, dtypes: tuple, **arrays: Array) -> None:
    names = ", ".join(jnp.dtype(d).name for d in dtypes)
    for name, array in arrays.items():
        _require(array.dtype in dtypes, kernel, f"{name} is {array.dtype.name}; it must be one of {names}")


def _check_caches(kernel: str, k_cache: Array, v_cache: Array, heads: int) -> None:
    _check_rank(kernel, k_cache=(k_cache, 4), v_cache=(v_cache, 4))
    _check_dtype(kernel, FLOATS, k_cache=k_cache, v_cache=v_cache)
    _require(k_cache.shape == v_cache.shape, kernel, f"the caches differ: {k_cache.shape} and {v_cache.shape}")
    _, kv_heads, page, dim = k_cache.shape
    _require(page in PAGE_SIZES, kernel, f"page size {page} is not one of {PAGE_SIZES}")
    _require(dim in HEAD_DIMS, kernel, f"head dimension {dim} is not one of {HEAD_DIMS}")
    _require(heads % kv_heads == 0, kernel, f"{heads} query heads are no multiple of {kv_heads} key/value heads")


def _check_table(kernel: str, page_table: Array, rows: int) -> None:
    _check_rank(kernel, page_table=(page_table, 2))
    _check_dtype(kernel, (jnp.int32,), page_table=page_table)
    _require(page_table.shape[0] == rows, kernel, f"page_table has {page_table.shape[0]} rows for {rows} requests")
    width = page_table.shape[1]
    _require(width % TABLE_MULTIPLE == 0, kernel, f"page_table is {width} wide; pad it with -1 to a multiple of {TABLE_MULTIPLE}")  # fmt: skip


def _check_sink(kernel: str, sink: Array | None, heads: int) -> None:
    if sink is not None:
        _check_rank(kernel, sink=(sink, 2))
        _require(sink.shape[0] == heads, kernel, f"sink has {sink.shape[0]} rows for {heads} heads")


def _check_window(kernel: str, sliding_window: int | None) -> None:
    _require(sliding_window is None or sliding_window > 0, kernel, f"sliding_window {sliding_window} must be above 0")


def _present(*arrays: Array | None) -> tuple[Array, ...]:
    return tuple(array for array in arrays if array is not None)


def _call(target: str, results, *operands: Array, aliases: dict[int, int] | None = None, **attributes):
    """One custom call; `attributes` are numbers of numpy types, booleans and strings."""
    used[target] += 1
    call = jax.ffi.ffi_call(target, results, input_output_aliases=aliases or {})
    return call(*operands, **attributes)


def _like(array: Array, shape: tuple[int, ...] | None = None, dtype=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape if shape is None else shape, array.dtype if dtype is None else dtype)


def _scale(scale: float | None, dim: int) -> np.float32:
    return np.float32(dim**-0.5 if scale is None else scale)


def _window(sliding_window: int | None) -> dict[str, np.int64]:
    return {} if sliding_window is None else {"sliding_window_size": np.int64(sliding_window)}


# ---- Attention over a paged cache


def paged_attention_decode(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    page_table: Array,
    positions: Array | None = None,
    *,
    mask: Array | None = None,
    sink: Array | None = None,
    scale: float | None = None,
    is_causal: bool = True,
    sliding_window: int | None = None,
) -> Array:
    """One new token of each request attends to its cached positions.

    Args:
        q: [1, B, H, D] float32 or bfloat16.
        k_cache, v_cache: [N, K, P, D]; H a multiple of K.
        page_table: [B, W] int32; -1 reads as zeros.
        positions: [B] int32, the token's own position: positions up to it are seen;
            -1 skips the request, whose result is zeros. Needed when is_causal.
        mask: [B, 1, H, W*P] float added to the scores; not with is_causal.
        sink: [H, 32] float, a score without a value for each head (first column).
        scale: of the scores; 1/sqrt(D) if None.
        sliding_window: only the last so many positions are seen.

    Returns:
        [1, B, H, D] in q's dtype.

    Raises:
        KernelError: shapes or dtypes that TTNN's kernel does not take.
    """
    kernel = "paged_attention_decode"
    _check_rank(kernel, q=(q, 4))
    _check_dtype(kernel, FLOATS, q=q)
    _, batch, heads, dim = q.shape
    _check_caches(kernel, k_cache, v_cache, heads)
    _require(q.shape[0] == 1 and dim == k_cache.shape[3], kernel, f"q {q.shape} does not fit caches {k_cache.shape}")
    _check_table(kernel, page_table, batch)
    _check_sink(kernel, sink, heads)
    _check_window(kernel, sliding_window)
    _require(is_causal != (mask is not None), kernel, "give a mask or is_causal, one of both")
    _require(not is_causal or positions is not None, kernel, "is_causal needs positions")
    if positions is not None:
        _check_rank(kernel, positions=(positions, 1))
        _check_dtype(kernel, (jnp.int32,), positions=positions)
    return _call(
        "tt.paged_scaled_dot_product_attention_decode",
        _like(q),
        q,
        k_cache,
        v_cache,
        page_table,
        *_present(mask, positions, sink),
        is_causal=is_causal,
        scale=_scale(scale, dim),
        has_attention_mask=mask is not None,
        has_cur_pos_tensor=positions is not None,
        has_attention_sink=sink is not None,
        **_window(sliding_window),
    )


def chunked_attention(
    q: Array, k_cache: Array, v_cache: Array, page_table: Array, start: Array, *, scale: float | None = None
) -> Array:
    """A chunk of one request attends, causally, to everything before it and to itself.

    Args:
        q: [1, H, S, D] float32 or bfloat16; S a multiple of 32.
        k_cache, v_cache: [N, K, P, D], the chunk's keys and values already written.
        page_table: [1, W] int32.
        start: [1] int32, position of the chunk's first token, a multiple of S.
        scale: of the scores; 1/sqrt(D) if None.

    Returns:
        [1, H, S, D] in q's dtype.
    """
    kernel = "chunked_attention"
    _check_rank(kernel, q=(q, 4), start=(start, 1))
    _check_dtype(kernel, FLOATS, q=q)
    _check_dtype(kernel, (jnp.int32,), start=start)
    _, heads, chunk, dim = q.shape
    _check_caches(kernel, k_cache, v_cache, heads)
    _require(q.shape[0] == 1 and dim == k_cache.shape[3], kernel, f"q {q.shape} does not fit caches {k_cache.shape}")
    _require(chunk % TILE == 0, kernel, f"a chunk of {chunk} tokens is no multiple of {TILE}: pad it")
    _check_table(kernel, page_table, 1)
    return _call(
        "tt.chunked_scaled_dot_product_attention",
        _like(q), q, k_cache, v_cache, page_table, start,
        scale=_scale(scale, dim),
    )  # fmt: skip


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Array | None = None,
    sink: Array | None = None,
    scale: float | None = None,
    is_causal: bool = True,
    sliding_window: int | None = None,
) -> Array:
    """Dense attention.

    Args:
        q: [B, H, T, D] float32 or bfloat16.
        k, v: [B, K, S, D]; H a multiple of K. is_causal needs T == S.
        mask: [B, 1 or H, T, S] float added to the scores; not with is_causal.
        sink: [H, 32] float, a score without a value for each head (first column).
        scale: of the scores; 1/sqrt(D) if None.
        sliding_window: only the last so many positions are seen.

    Returns:
        [B, H, T, D] in q's dtype.
    """
    kernel = "attention"
    _check_rank(kernel, q=(q, 4), k=(k, 4), v=(v, 4))
    _check_dtype(kernel, FLOATS, q=q, k=k, v=v)
    batch, heads, tokens, dim = q.shape
    _require(k.shape == v.shape and k.shape[0] == batch and k.shape[3] == dim, kernel, f"q {q.shape}, k {k.shape} and v {v.shape} do not fit")  # fmt: skip
    _require(dim in HEAD_DIMS, kernel, f"head dimension {dim} is not one of {HEAD_DIMS}")
    _require(heads % k.shape[1] == 0, kernel, f"{heads} query heads are no multiple of {k.shape[1]} key/value heads")
    _require(not (is_causal and mask is not None), kernel, "give a mask or is_causal, not both")
    _require(not is_causal or tokens == k.shape[2], kernel, f"is_causal needs as many queries ({tokens}) as keys ({k.shape[2]})")  # fmt: skip
    _check_sink(kernel, sink, heads)
    _check_window(kernel, sliding_window)
    return _call(
        "tt.scaled_dot_product_attention",
        _like(q),
        q,
        k,
        v,
        *_present(mask, sink),
        is_causal=is_causal,
        scale=_scale(scale, dim),
        has_attention_mask=mask is not None,
        has_attention_sink=sink is not None,
        **_window(sliding_window),
    )


# ---- Writing a paged cache


def _check_writable(kernel: str, cache: Array, x: Array, heads_axis: int) -> None:
    _check_rank(kernel, cache=(cache, 4), x=(x, 4))
    _check_dtype(kernel, FLOATS, cache=cache)
    # BFP8 and other new values into a cache have given bad results on hardware.
    _check_dtype(kernel, (cache.dtype,), x=x)
    _require(cache.shape[2] in PAGE_SIZES, kernel, f"page size {cache.shape[2]} is not one of {PAGE_SIZES}")
    _require(cache.shape[3] in HEAD_DIMS, kernel, f"head dimension {cache.shape[3]} is not one of {HEAD_DIMS}")
    fits = x.shape[0] == 1 and x.shape[heads_axis] == cache.shape[1] and x.shape[3] == cache.shape[3]
    _require(fits, kernel, f"x {x.shape} does not fit a cache of {cache.shape}")


def paged_update_cache(cache: Array, x: Array, positions: Array, page_table: Array) -> Array:
    """Write one position of each request, in place.

    Args:
        cache: [N, K, P, D] float32 or bfloat16; its buffer becomes the result's where it is donated.
        x: [1, B, K, D] in the cache's dtype.
        positions: [B] int32; -1 writes nothing.
        page_table: [B, W] int32; a page of -1 is never written.

    Returns:
        The cache. Where rows name one place twice, the last wins.
    """
    kernel = "paged_update_cache"
    _check_writable(kernel, cache, x, heads_axis=2)
    _check_rank(kernel, positions=(positions, 1))
    _check_dtype(kernel, (jnp.int32,), positions=positions)
    _check_table(kernel, page_table, x.shape[1])
    return _call(
        "tt.paged_update_cache", _like(cache), cache, x, positions, page_table, aliases={0: 0}, share_cache=False
    )


def paged_fill_cache(cache: Array, x: Array, page_table: Array, batch_index: Array | None = None) -> Array:
    """Write a prompt from its first position on, in place.

    Args:
        cache: [N, K, P, D] float32 or bfloat16; its buffer becomes the result's where it is donated.
        x: [1, K, S, D] in the cache's dtype.
        page_table: [B, W] int32; a page of -1 is never written.
        batch_index: [1] int32, the row of page_table; row 0 if None.

    Returns:
        The cache.
    """
    kernel = "paged_fill_cache"
    _check_writable(kernel, cache, x, heads_axis=1)
    _check_table(kernel, page_table, page_table.shape[0])
    if batch_index is not None:
        _check_rank(kernel, batch_index=(batch_index, 1))
        _check_dtype(kernel, (jnp.int32,), batch_index=batch_index)
    held = page_table.shape[1] * cache.shape[2]
    _require(x.shape[2] <= held, kernel, f"{x.shape[2]} positions do not fit a page table of {held}")
    return _call("tt.paged_fill_cache", _like(cache), cache, x, page_table, *_present(batch_index), aliases={0: 0})


# ---- Multi-head latent attention


def mla_decode(
    q: Array, cache: Array, page_table: Array, positions: Array, *, head_dim_v: int, scale: float | None = None
) -> Array:
    """One new token of each request attends to its cached latents, whose first `head_dim_v` columns are the values.

    Args:
        q: [1, B, H, D] float32 or bfloat16.
        cache: [N, 1, P, D].
        page_table: [B, W] int32; -1 reads as zeros.
        positions: [B] int32; -1 skips the request.

    Returns:
        [1, B, H, head_dim_v] in q's dtype.
    """
    kernel = "mla_decode"
    _check_rank(kernel, q=(q, 4), cache=(cache, 4), positions=(positions, 1))
    _check_dtype(kernel, FLOATS, q=q, cache=cache)
    _check_dtype(kernel, (jnp.int32,), positions=positions)
    _, batch, heads, dim = q.shape
    _require(cache.shape[1] == 1 and cache.shape[3] == dim, kernel, f"q {q.shape} does not fit a cache of {cache.shape}")  # fmt: skip
    _require(cache.shape[2] in PAGE_SIZES, kernel, f"page size {cache.shape[2]} is not one of {PAGE_SIZES}")
    _check_latent(kernel, dim, head_dim_v)
    _check_table(kernel, page_table, batch)
    return _call(
        "tt.paged_flash_mla_decode",
        _like(q, (1, batch, heads, head_dim_v)), q, cache, page_table, positions,
        head_dim_v=np.int64(head_dim_v), is_causal=True, scale=_scale(scale, dim),
        has_attention_mask=False, has_cur_pos_tensor=True, has_attention_sink=False, has_value=False,
    )  # fmt: skip


def mla_prefill(q: Array, latents: Array, *, head_dim_v: int, scale: float | None = None) -> Array:
    """Tokens attend, causally, to the latents of one sequence, whose first `head_dim_v` columns are the values.

    Args:
        q: [B, H, T, D] float32 or bfloat16.
        latents: [B, 1, T, D].

    Returns:
        [B, H, T, head_dim_v] in q's dtype.
    """
    kernel = "mla_prefill"
    _check_rank(kernel, q=(q, 4), latents=(latents, 4))
    _check_dtype(kernel, FLOATS, q=q, latents=latents)
    batch, heads, tokens, dim = q.shape
    _require(latents.shape == (batch, 1, tokens, dim), kernel, f"latents {latents.shape} do not fit q {q.shape}")
    _check_latent(kernel, dim, head_dim_v)
    return _call(
        "tt.flash_mla_prefill",
        _like(q, (batch, heads, tokens, head_dim_v)), q, latents,
        head_dim_v=np.int64(head_dim_v), is_causal=True, scale=_scale(scale, dim),
        has_attention_mask=False, has_value=False,
    )  # fmt: skip


def _check_latent(kernel: str, dim: int, head_dim_v: int) -> None:
    _require(dim % TILE == 0 and head_dim_v % TILE == 0 and 0 < head_dim_v <= dim, kernel, f"head_dim_v {head_dim_v} of latents of {dim}: both must be multiples of {TILE}")  # fmt: skip


# ---- Gated delta rule


def gated_delta_rule(q: Array, k: Array, v: Array, gate: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """A sequence through the gated delta rule: S <- exp(gate) S; S <- S + k (beta (v - S^T k))^T; out = S^T q.

    Args:
        q, k: [B, T, H, 128] float32 or bfloat16; q scaled, both normalised by the caller.
        v: [B, T, H, 128].
        gate: [B, T, H] float32, logarithm of the decay.
        beta: [B, T, H] float32.
        state: [B, H, 128, 128] float32, keys by values.

    Returns:
        (state after the last token, out [B, T, H, 128] in q's dtype).
    """
    kernel = "gated_delta_rule"
    _check_rank(kernel, q=(q, 4), k=(k, 4), v=(v, 4), gate=(gate, 3), beta=(beta, 3), state=(state, 4))
    _check_dtype(kernel, FLOATS, q=q, k=k, v=v)
    _check_dtype(kernel, (jnp.float32,), gate=gate, beta=beta, state=state)
    batch, tokens, heads, dim = q.shape
    _require(q.shape == k.shape == v.shape and dim == STATE_DIM, kernel, f"q {q.shape}, k {k.shape} and v {v.shape} must be alike, with heads of {STATE_DIM}")  # fmt: skip
    _require(gate.shape == beta.shape == (batch, tokens, heads), kernel, f"gate {gate.shape} and beta {beta.shape} do not fit q {q.shape}")  # fmt: skip
    _require(state.shape == (batch, heads, dim, dim), kernel, f"state {state.shape} does not fit q {q.shape}")
    return _call("tt.gated_delta_rule", [_like(state), _like(q)], q, k, v, gate, beta, state)


def gated_delta_decode(
    state: Array, qkv: Array, b: Array, a: Array, a_log: Array, dt_bias: Array, indices: Array, initial: Array
) -> tuple[Array, Array]:
    """One token of each request through the gated delta rule, on states kept in slots; in place.

    Normalisation of q and k (l2), q's scale 1/sqrt(128), beta = sigmoid(b) and
    gate = -exp(a_log) softplus(a + dt_bias) are the kernel's.

    Args:
        state: [slots, H, 128, 128] float32; slot 0 is padding and never written.
        qkv: [B, (2 Hk + H) 128] float32 or bfloat16: q and k of Hk heads, v of H; H a multiple of Hk.
        b, a: [B, H] float32 or bfloat16.
        a_log, dt_bias: [H] float32.
        indices: [B] int32, the slot of each request.
        initial: [B] int32, 0 where a request begins and its slot counts as zeros.

    Returns:
        (state, out [B, H * 128] float32).
    """
    kernel = "gated_delta_decode"
    _check_rank(kernel, state=(state, 4), qkv=(qkv, 2), b=(b, 2), a=(a, 2), indices=(indices, 1), initial=(initial, 1))
    _check_dtype(kernel, (jnp.float32,), state=state, a_log=a_log, dt_bias=dt_bias)
    _check_dtype(kernel, FLOATS, qkv=qkv, a=a, b=b)
    _check_dtype(kernel, (jnp.int32,), indices=indices, initial=initial)
    _, heads, dim, _ = state.shape
    _require(state.shape[2:] == (STATE_DIM, STATE_DIM), kernel, f"state {state.shape} must have heads of {STATE_DIM}")
    rest = qkv.shape[1] // dim - heads
    _require(qkv.shape[1] % dim == 0 and rest > 0 and rest % 2 == 0 and heads % (rest // 2) == 0, kernel, f"qkv of {qkv.shape[1]} columns does not hold q, k and v of {heads} value heads")  # fmt: skip
    batch = qkv.shape[0]
    alike = a.shape == b.shape == (batch, heads) and a_log.shape == dt_bias.shape == (heads,)
    _require(alike and indices.shape == initial.shape == (batch,), kernel, f"a, b, a_log, dt_bias, indices or initial do not fit {batch} requests of {heads} heads")  # fmt: skip
    out = jax.ShapeDtypeStruct((batch, heads * dim), jnp.float32)
    return _call(
        "tt.gated_delta_decode", [_like(state), out], state, qkv, b, a, a_log, dt_bias, indices, initial, aliases={0: 0}
    )


def causal_conv1d_update(
    state: Array, value: Array, weight: Array, indices: Array, initial: Array
) -> tuple[Array, Array]:
    """One token of each request through a causal depthwise convolution, on windows kept in slots; in place.

    Args:
        state: [slots, C, L-1] float32 or bfloat16, the last inputs; slot 0 is padding and never written.
        value: [B, C] in the state's dtype.
        weight: [C, L].
        indices: [B] int32, the slot of each request.
        initial: [B] int32, 0 where a request begins and its window counts as zeros.

    Returns:
        (state, sum over the window of weight times input [B, C] in value's dtype).
    """
    kernel = "causal_conv1d_update"
    _check_rank(kernel, state=(state, 3), value=(value, 2), weight=(weight, 2), indices=(indices, 1), initial=(initial, 1))  # fmt: skip
    _check_dtype(kernel, FLOATS, state=state, weight=weight)
    _check_dtype(kernel, (state.dtype,), value=value)
    _check_dtype(kernel, (jnp.int32,), indices=indices, initial=initial)
    _, channels, window = state.shape
    fits = value.shape == (indices.shape[0], channels) and weight.shape == (channels, window + 1)
    _require(fits and indices.shape == initial.shape, kernel, f"value {value.shape} and weight {weight.shape} do not fit state {state.shape}")  # fmt: skip
    return _call(
        "tt.causal_conv1d_update", [_like(state), _like(value)], state, value, weight, indices, initial, aliases={0: 0}
    )


def state_pool_update(state: Array, indices: Array, updates: Array) -> Array:
    """Write whole slots of a pool of states, in place.

    Args:
        state: [slots, …] float32 or bfloat16; slot 0 is padding and never written.
        indices: [B] int32.
        updates: [B, …] in the state's dtype.

    Returns:
        The pool. Where two rows name one slot, the last wins.
    """
    kernel = "state_pool_update"
    _check_dtype(kernel, FLOATS, state=state)
    _check_dtype(kernel, (state.dtype,), updates=updates)
    _check_rank(kernel, indices=(indices, 1))
    _check_dtype(kernel, (jnp.int32,), indices=indices)
    _require(updates.shape == (indices.shape[0], *state.shape[1:]), kernel, f"updates {updates.shape} do not fit state {state.shape}")  # fmt: skip
    return _call("tt.state_pool_update", _like(state), state, indices, updates, aliases={0: 0})


# ---- Mixture of experts, sampling


def fused_moe_ep(x: Array, weights: Array, ids: Array, w1: Array, w3: Array, w2: Array) -> Array:
    """This chip's part of a mixture of experts: sum over k of weight * w2(silu(w1 x) * w3 x).

    Args:
        x: [T, C] bfloat16. More than 512 tokens are split by the kernel.
        weights: [T, k] float32.
        ids: [T, k] int32, experts of this chip; negative is padding.
        w1, w3: [E, C, I]; w2: [E, I, C].

    Returns:
        [T, C] bfloat16.
    """
    kernel = "fused_moe_ep"
    _check_rank(kernel, x=(x, 2), weights=(weights, 2), ids=(ids, 2), w1=(w1, 3), w3=(w3, 3), w2=(w2, 3))
    _check_dtype(kernel, (jnp.bfloat16,), x=x)
    _check_dtype(kernel, FLOATS, w1=w1, w3=w3, w2=w2)
    _check_dtype(kernel, (jnp.float32,), weights=weights)
    _check_dtype(kernel, (jnp.int32,), ids=ids)
    experts, channels, inner = w1.shape
    fits = w1.shape == w3.shape and w2.shape == (experts, inner, channels) and x.shape[1] == channels
    _require(fits and weights.shape == ids.shape and ids.shape[0] == x.shape[0], kernel, f"x {x.shape}, ids {ids.shape}, w1 {w1.shape}, w3 {w3.shape} and w2 {w2.shape} do not fit")  # fmt: skip
    return _call("tt.fused_moe_ep", _like(x), x, weights, ids, w1, w3, w2)


def sparse_matmul(a: Array, b: Array, sparsity: Array, *, nnz: int | None = None) -> Array:
    """Rows times the experts that `sparsity` marks; results of unmarked experts are zeros.

    Args:
        a: [A, B, M, K] float32 or bfloat16.
        b: [1, E, K, N].
        sparsity: [A, B, 1, E]; not 0 where a row of A, B meets expert E.
        nnz: how many entries of sparsity are not 0, where that is known.

    Returns:
        [A, B, 1, E, M, N] in a's dtype.
    """
    kernel = "sparse_matmul"
    _check_rank(kernel, a=(a, 4), b=(b, 4), sparsity=(sparsity, 4))
    _check_dtype(kernel, FLOATS, a=a, b=b)
    first, second, rows, depth = a.shape
    _, experts, inner, columns = b.shape
    _require(b.shape[0] == 1 and inner == depth, kernel, f"a {a.shape} and b {b.shape} do not fit")
    _require(sparsity.shape == (first, second, 1, experts), kernel, f"sparsity {sparsity.shape} must be {(first, second, 1, experts)}")  # fmt: skip
    known = {} if nnz is None else {"nnz": np.int64(nnz)}
    return _call(
        "tt.sparse_matmul",
        _like(a, (first, second, 1, experts, rows, columns)), a, b, sparsity,
        is_input_a_sparse=False, is_input_b_sparse=True, **known,
    )  # fmt: skip


def sampling(values: Array, indices: Array, k: Array, p: Array, temperature: Array, *, seed: int) -> Array:
    """One token for each row out of its candidates: top k, then top p, at a temperature.

    Args:
        values: [B, C] float32 or bfloat16, logits of the candidates.
        indices: [B, C] int32, the candidates' tokens.
        k: [B] int32, at least 1; 1 is the greedy choice.
        p: [B] float32 in (0, 1].
        temperature: [B] float32 above 0.
        seed: of the random stream.

    Returns:
        [B] int32.
    """
    kernel = "sampling"
    _check_rank(kernel, values=(values, 2), indices=(indices, 2), k=(k, 1), p=(p, 1), temperature=(temperature, 1))
    _check_dtype(kernel, FLOATS, values=values)
    _check_dtype(kernel, (jnp.int32,), indices=indices, k=k)
    _check_dtype(kernel, (jnp.float32,), p=p, temperature=temperature)
    batch = values.shape[0]
    _require(values.shape == indices.shape and k.shape == p.shape == temperature.shape == (batch,), kernel, f"values {values.shape}, indices {indices.shape}, k, p and temperature do not fit")  # fmt: skip
    out = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return _call("tt.sampling", out, values, indices, k, p, temperature, seed=np.uint32(seed))


# ---- Marks on weights


def mark_argument(x: Array, *, kind: str, name: str) -> Array:
    """Say what an argument of the program is: libtt keeps a "parameter" on the chip.

    Args:
        kind: "parameter", "constant" or "input".
        name: what it is called in dumps.
    """
    _require(kind in ("parameter", "constant", "input"), "mark_argument", f"kind {kind!r} is unknown")
    return _call("tt.mark_argument", _like(x), x, **{"ttcore.argument_type": kind, "ttir.name": name})


def weight_dtype_override(weight: Array, dtype: str) -> Array:
    """Let libtt keep a weight in "bf16", "bfp_bf8" or "bfp_bf4"."""
    _require(dtype in WEIGHT_DTYPES, "weight_dtype_override", f"dtype {dtype!r} is not one of {WEIGHT_DTYPES}")
    return _call("tt.weight_dtype_override", _like(weight), weight, **{"ttcore.weight_dtype": dtype})
