"""Reading and writing the KV pages: plain torch, traced into the programs.

Two functions write the cache, write_tokens and write_chunk, and two read it,
decode_attention and prefill_attention: the seam at which a kernel of the chip can
stand in. Their shapes are those of TTNN's paged calls: page tables of requests
in rows, caches as kv_pool lays them out.
"""

import torch

# Below every score; -inf would make a row that sees nothing a NaN.
_MASKED = -1e30


def write_tokens(cache: torch.Tensor, x: torch.Tensor, page_table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Write one position of each request.

    Args:
        cache: [pages, kv_heads, page_size, head_dim].
        x: [requests, kv_heads, head_dim].
        page_table: [requests, table_width] int.
        positions: [requests] int, where in its request each row belongs.

    Returns:
        The cache with the rows written.
    """
    page_size = cache.shape[2]
    page = page_table.gather(1, (positions // page_size)[:, None])
    head = torch.arange(cache.shape[1], device=cache.device)[None, :]
    offset = (positions % page_size)[:, None]
    return cache.index_put((page, head, offset), x.to(cache.dtype))


def write_chunk(
    cache: torch.Tensor, x: torch.Tensor, page_table: torch.Tensor, start: torch.Tensor, length: torch.Tensor
) -> torch.Tensor:
    """Write the first `length` of a chunk of consecutive positions of one request.

    Whole pages are read, merged and written: a handful of big moves in place of
    one small one per position and head.

    Args:
        cache: [pages, kv_heads, page_size, head_dim].
        x: [tokens, kv_heads, head_dim].
        page_table: [1, table_width] int.
        start: [] int, position of the first token; need not begin a page.
        length: [] int, how many of the tokens are real.

    Returns:
        The cache with the tokens written.
    """
    tokens, (_, heads, page_size, dim) = x.shape[0], cache.shape
    # A chunk that does not begin a page reaches into one page more.
    count = -(-tokens // page_size) + 1
    first = start // page_size
    row = first + torch.arange(count, device=cache.device)
    last = page_table.shape[1] - 1
    page = torch.where(row <= last, page_table[0][row.clamp(max=last)], 0)
    token = first * page_size - start + torch.arange(count * page_size, device=cache.device)
    real = (token >= 0) & (token < length)
    new = x[token.clamp(0, tokens - 1)].to(cache.dtype).view(count, page_size, heads, dim).transpose(1, 2)
    merged = torch.where(real.view(count, 1, page_size, 1), new, cache[page])
    return cache.index_put((page,), merged)


def _pages_of(cache: torch.Tensor, page_table: torch.Tensor) -> torch.Tensor:
    """[requests, kv_heads, table_width * page_size, head_dim] in float32."""
    requests, width = page_table.shape
    _, heads, page_size, dim = cache.shape
    pages = cache[page_table].transpose(1, 2)
    return pages.reshape(requests, heads, width * page_size, dim).float()


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """Softmax attention in float32.

    Args:
        q: [requests, kv_heads, rows, head_dim].
        keys, values: [requests, kv_heads, context, head_dim].
        visible: [requests, 1, rows, context] bool.
    """
    scores = torch.matmul(q.float(), keys.transpose(-1, -2)) * scale
    weights = torch.softmax(torch.where(visible, scores, _MASKED), dim=-1)
    return torch.matmul(weights, values)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One new token of each request attends to its pages up to its own position.

    Args:
        q: [requests, heads, head_dim].
        k_cache, v_cache: [pages, kv_heads, page_size, head_dim].
        page_table: [requests, table_width] int; what lies past the position is not looked at.
        positions: [requests] int.

    Returns:
        [requests, heads, v_head_dim] in q's dtype.
    """
    requests, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    keys, values = _pages_of(k_cache, page_table), _pages_of(v_cache, page_table)
    visible = torch.arange(keys.shape[2], device=q.device) <= positions[:, None, None, None]
    grouped = q.view(requests, kv_heads, heads // kv_heads, dim)
    out = _attend(grouped, keys, values, visible, scale)
    return out.reshape(requests, heads, -1).to(q.dtype)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    start: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """A chunk of one request attends, causally, to everything before it and to itself.

    Args:
        q: [tokens, heads, head_dim], consecutive positions from `start` on.
        k_cache, v_cache: [pages, kv_heads, page_size, head_dim], the chunk already written.
        page_table: [1, table_width] int.
        start: [] int.

    Returns:
        [tokens, heads, v_head_dim] in q's dtype.
    """
    tokens, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    keys, values = _pages_of(k_cache, page_table), _pages_of(v_cache, page_table)
    # Rows are (head of the group, token), so that a KV head is read once for its group.
    rows = q.view(tokens, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, group * tokens, dim)
    position = start + torch.arange(tokens, device=q.device)
    causal = torch.arange(keys.shape[2], device=q.device) <= position[:, None]
    visible = causal.repeat(group, 1)[None, None]
    out = _attend(rows, keys, values, visible, scale)
    return out.view(kv_heads, group, tokens, -1).permute(2, 0, 1, 3).reshape(tokens, heads, -1).to(q.dtype)
