"""Cutting batches into compiled shapes."""

import numpy as np
import pytest

from bridge.sglang_platform.buckets import chunks, page_rows, pieces

BUCKETS = ([1], [1, 4], [2, 3, 8], [64], [32, 64, 256])


@pytest.mark.parametrize("buckets", BUCKETS, ids=str)
@pytest.mark.parametrize("total", [1, 3, 4, 5, 9, 64, 65, 300])
def test_pieces_hold_all_rows_with_the_least_padding_at_the_end(buckets, total):
    """All but the last piece fill the largest bucket, and no smaller bucket would hold the last."""
    cut = list(pieces(total, buckets))
    assert sum(rows for rows, _ in cut) == total
    assert all(rows == bucket == buckets[-1] for rows, bucket in cut[:-1])
    rows, bucket = cut[-1]
    assert rows <= bucket
    assert not [smaller for smaller in buckets if rows <= smaller < bucket]


@pytest.mark.parametrize("start", [0, 32, 64, 96, 256])
@pytest.mark.parametrize("total", [1, 31, 33, 200, 513])
def test_chunks_begin_at_multiples_of_their_bucket(start, total):
    """A prompt's chunks follow each other without a gap, each where the chip's attention can begin one."""
    position = start
    for rows, bucket in chunks(start, total, [32, 64, 256]):
        assert 0 < rows <= bucket
        assert position % bucket == 0
        position += rows
    assert position == start + total


def test_chunks_where_no_bucket_fits_the_start():
    """A start that is a multiple of no bucket is served all the same."""
    assert list(chunks(5, 70, [64])) == [(64, 64), (6, 64)]


@pytest.mark.parametrize("page_size", [32, 64, 128])
def test_page_rows_hold_the_pages_in_use(page_size):
    """A row names the pages of the request's positions in order, and page 0 beyond its length, stale places or not."""
    pages = np.array([[7, 3, 9, 5], [2, 8, 4, 6]])
    slots = (pages[:, :, None] * page_size + np.arange(page_size)).reshape(2, -1)
    lengths = np.array([2 * page_size + 1, page_size])
    rows = page_rows(slots, lengths, page_size, width=6)
    assert rows.dtype == np.int32
    assert rows.tolist() == [[7, 3, 9, 0, 0, 0], [2, 0, 0, 0, 0, 0]]
