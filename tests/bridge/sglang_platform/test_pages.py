"""Writing a chunk of a prompt into the KV pages."""

import pytest
import torch

from bridge.sglang_platform.pages import write_chunk

HEADS, DIM, PAGES = 2, 8, 12


@pytest.mark.parametrize("page_size", [32, 64, 128])
@pytest.mark.parametrize("tokens", [32, 64, 160])
@pytest.mark.parametrize("start", [0, 32, 64, 100])
@pytest.mark.parametrize("padding", [0, 1, 31])
def test_a_chunk_lands_on_its_positions_and_nowhere_else(page_size, tokens, start, padding):
    """Each real token is found at its position; all other places but those of page 0 keep what they held."""
    generator = torch.Generator().manual_seed(page_size + tokens + start)
    cache = torch.randn(PAGES, HEADS, page_size, DIM, generator=generator)
    x = torch.randn(tokens, HEADS, DIM, generator=generator)
    length = tokens - padding
    table = torch.zeros(1, 9, dtype=torch.long)
    used = -(-(start + length) // page_size)
    table[0, :used] = torch.randperm(PAGES - 1, generator=generator)[:used] + 1
    want = cache.clone()
    for token in range(length):
        position = start + token
        want[table[0, position // page_size], :, position % page_size] = x[token]

    got = write_chunk(cache, x, table, torch.tensor(start), torch.tensor(length))

    assert torch.equal(got[1:], want[1:])


def test_a_chunk_that_reaches_past_the_table_writes_what_fits():
    """Padding beyond the last position that the table can name is dropped."""
    cache, table = torch.zeros(4, HEADS, 32, DIM), torch.tensor([[1, 2]])
    got = write_chunk(cache, torch.ones(64, HEADS, DIM), table, torch.tensor(32), torch.tensor(32))
    assert torch.equal(got[2], torch.ones(HEADS, 32, DIM))
    assert not got[1].any() and not got[3].any()


def test_a_cache_keeps_its_dtype():
    """Float32 keys written into a bfloat16 cache are rounded to it."""
    cache = torch.zeros(3, HEADS, 32, DIM, dtype=torch.bfloat16)
    x = torch.randn(32, HEADS, DIM)
    got = write_chunk(cache, x, torch.tensor([[2]]), torch.tensor(0), torch.tensor(32))
    assert got.dtype == torch.bfloat16
    assert torch.equal(got[2], x.transpose(0, 1).to(torch.bfloat16))
