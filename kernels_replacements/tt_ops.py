"""Some of the `tt.*` calls as torch functions, for programs that torch_tpu traces.

torch_tpu takes a JAX function into a program as an operator; here those functions are the
ones of tt_calls. JAX is imported with `register`, which the first call does if nobody has;
torch.compile needs it done before.
"""

import types
import warnings

import torch

_TABLE_MULTIPLE = 8  # a row of a page table is read in blocks of 8


# Not functools.cache: Dynamo looks through it and would register a second time.
_registered: types.SimpleNamespace | None = None


def register() -> None:
    """Make the calls operators of torch, once a process."""
    global _registered
    if _registered is not None:
        return
    import jax
    from torch_tpu._internal.pallas.pallas import jax_op

    from kernels_replacements import tt_calls, window_attention

    array = jax.Array

    def decode(
        q: array, k_cache: array, v_cache: array, page_table: array, positions: array, scale: float, window: int
    ) -> array:
        return tt_calls.paged_attention_decode(
            q, k_cache, v_cache, page_table, positions, scale=scale, sliding_window=window or None
        )

    def chunked(q: array, k_cache: array, v_cache: array, page_table: array, start: array, scale: float) -> array:
        return tt_calls.chunked_attention(q, k_cache, v_cache, page_table, start, scale=scale)

    def windowed(
        q: array, k_cache: array, v_cache: array, page_table: array, start: array, scale: float, window: int
    ) -> array:
        return window_attention.chunked_window_attention(
            q, k_cache, v_cache, page_table, start, scale=scale, sliding_window=window
        )

    def update(cache: array, x: array, positions: array, page_table: array) -> array:
        return tt_calls.paged_update_cache(cache, x, positions, page_table)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that jax_op may change: torch_tpu's version is pinned
        _registered = types.SimpleNamespace(
            decode=jax_op("tt::paged_attention_decode", decode),
            chunked=jax_op("tt::chunked_attention", chunked),
            windowed=jax_op("tt::chunked_window_attention", windowed),
            update=jax_op("tt::paged_update_cache", update),
        )


def _operators() -> types.SimpleNamespace:
    if _registered is None:
        register()
    return _registered


def _table(page_table: torch.Tensor) -> torch.Tensor:
    """As the calls want it: int32, its width a multiple of 8; the pages added are none."""
    missing = -page_table.shape[1] % _TABLE_MULTIPLE
    return torch.nn.functional.pad(page_table.int(), (0, missing), value=-1)


def paged_attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """One new token of each request attends to its pages up to its own position.

    Args:
        q: [requests, heads, head_dim] float32 or bfloat16.
        k_cache, v_cache: [pages, kv_heads, page_size, head_dim].
        page_table: [requests, table_width] int.
        positions: [requests] int.
        sliding_window: only the last so many positions are seen, the token's own among them.

    Returns:
        [requests, heads, head_dim] in q's dtype.

    Raises:
        KernelError: shapes or dtypes that TTNN's kernel does not take.
    """
    return _operators().decode(
        q[None], k_cache, v_cache, _table(page_table), positions.int(), scale, sliding_window or 0
    )[0]


def chunked_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    start: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """A chunk of one request attends, causally, to everything before it and to itself.

    Args:
        q: [tokens, heads, head_dim], consecutive positions from `start` on; tokens a multiple of 32.
        k_cache, v_cache: [pages, kv_heads, page_size, head_dim], the chunk already written.
        page_table: [1, table_width] int.
        start: [] int; on silicon a multiple of the tokens.
        sliding_window: each token sees only the last so many positions, its own among them.

    Returns:
        [tokens, heads, head_dim] in q's dtype.
    """
    arguments = (q.transpose(0, 1)[None], k_cache, v_cache, _table(page_table), start.int()[None], scale)
    if sliding_window is None:
        return _operators().chunked(*arguments)[0].transpose(0, 1)
    return _operators().windowed(*arguments, sliding_window)[0].transpose(0, 1)


def paged_update_cache(
    cache: torch.Tensor, x: torch.Tensor, page_table: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The cache with one position of each request written, in place where a program owns it.

    Args:
        cache: [pages, kv_heads, page_size, head_dim].
        x: [requests, kv_heads, head_dim].
        page_table: [requests, table_width] int.
        positions: [requests] int; -1 writes nothing.
    """
    return _operators().update(cache, x[None], positions.int(), _table(page_table))
