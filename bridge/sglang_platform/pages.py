"""Writing a chunk of a prompt into the KV pages: plain torch, traced into the prefill programs."""

import torch


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
