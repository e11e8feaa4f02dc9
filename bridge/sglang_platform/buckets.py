"""Cutting batches into compiled shapes, and the page tables that go with them; no SGLang, no chip."""

from collections.abc import Iterator

import numpy as np


def pieces(total: int, buckets: list[int]) -> Iterator[tuple[int, int]]:
    """Cut `total` rows into (rows, bucket): full largest buckets, then the smallest that holds the rest.

    Args:
        total: rows to run, at least 1.
        buckets: compiled sizes, ascending.
    """
    while total > 0:
        rows = min(total, buckets[-1])
        yield rows, next(bucket for bucket in buckets if bucket >= rows)
        total -= rows


def chunks(start: int, total: int, buckets: list[int]) -> Iterator[tuple[int, int]]:
    """Cut the `total` positions of a request from `start` on into (positions, bucket).

    A chunk begins at a multiple of its bucket where there is one that fits: so the
    chip's attention wants it.
    """
    end = start + total
    while start < end:
        fitting = [bucket for bucket in buckets if start % bucket == 0] or buckets
        rows, bucket = next(pieces(end - start, fitting))
        yield rows, bucket
        start += rows


def page_rows(slots: np.ndarray, lengths: np.ndarray, page_size: int, width: int) -> np.ndarray:
    """The page tables of some requests.

    Args:
        slots: int [requests, positions], where SGLang keeps each position of each request; a
            page's positions follow each other. What lies past a request's length is stale.
        lengths: int [requests], positions in use.
        page_size: positions in a page.
        width: entries in a row of the table.

    Returns:
        int32 [requests, width]: the pages in use, then page 0, which belongs to nobody.
    """
    first = slots[:, : width * page_size : page_size]
    used = np.arange(first.shape[1]) * page_size < lengths[:, None]
    rows = np.zeros((len(slots), width), dtype=np.int32)
    rows[:, : first.shape[1]] = np.where(used, first // page_size, 0)
    return rows
