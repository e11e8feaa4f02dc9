"""Decode steps, each begun before SGLang asks for it where that can be.

Between two steps SGLang's scheduler sends tokens off, looks for new requests and
prepares the next batch, mostly the same one; the chip would stand still meanwhile.
So the next step begins as soon as it is known which requests go on, and with which
tokens; nothing that SGLang decides is anticipated. What it then asks for is compared
row by row: a row serves where request, token, position and pages are the same, and
the others run as if nothing had begun. A row that nobody asks for has written keys
and values behind the end of its request, where nobody reads before the next owner
of the page has written.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch


@dataclasses.dataclass(frozen=True)
class Going:
    """A request that goes on.

    Attributes:
        rid: its id.
        slot: its row in SGLang's table of places.
        token: its last token, which has not been run.
        position: that token's.
    """

    rid: str
    slot: int
    token: int
    position: int


class DecodeSteps:
    """Runs decode batches, from steps begun early where they serve.

    Args:
        start: starts the chip on rows of int32 [rows, …] and returns what waits for their
            logits, float32 [rows, vocabulary] on the host. A row says all that they depend on
            but what is in the request's pages.
    """

    def __init__(self, start: Callable[[np.ndarray], Callable[[], torch.Tensor]]):
        self._start = start
        self._last: set[str] = set()  # the requests of the last batch, if no other has been begun or run since
        self._begun: dict[tuple[str, bytes], int] = {}
        self._logits: Callable[[], torch.Tensor] | None = None

    def begin(self, rids: Sequence[str], data: np.ndarray) -> None:
        """Begin the next step of the last batch, or of what is left of it; does nothing for other requests."""
        if not rids or not self._last.issuperset(rids):
            return
        self._last = set()
        self._logits = self._start(data)
        self._begun = {key: row for row, key in enumerate(_keys(rids, data))}

    def forget(self, rids: Iterable[str]) -> None:
        """Another kind of batch is run, which writes these requests' pages."""
        self._last = set()
        written = set(rids)
        self._begun = {key: row for key, row in self._begun.items() if key[0] not in written}

    def forget_all(self) -> None:
        """The weights are about to change."""
        self._last, self._begun = set(), {}

    def run(self, rids: Sequence[str], data: np.ndarray) -> torch.Tensor:
        """Logits of a decode batch."""
        begun, self._begun, self._last = self._begun, {}, set(rids)
        rows = [begun.get(key) for key in _keys(rids, data)]
        served = [row for row in rows if row is not None]
        if not served:
            return self._start(data)()
        if len(served) == len(rows):
            return _pick(self._logits(), served)
        rest = self._start(data[[row is None for row in rows]])
        parts = iter(_pick(self._logits(), served)), iter(rest())
        return torch.stack([next(parts[row is None]) for row in rows])


def _keys(rids: Sequence[str], data: np.ndarray) -> list[tuple[str, bytes]]:
    return [(rid, row.tobytes()) for rid, row in zip(rids, data, strict=True)]


def _pick(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return logits if rows == list(range(len(logits))) else logits[rows]


class Runner(Protocol):
    """What the hooks below tell of SGLang's scheduler."""

    def begin_next(self, going: Sequence[Going]) -> None:
        """A step's tokens are sent off, and these requests go on."""

    def forget_begun(self) -> None:
        """The weights are about to change."""


_runner: Runner | None = None


def install(runner: Runner) -> None:
    """Have the hooks tell the runner of this process."""
    global _runner
    _runner = runner


def begin_next(_streamer: Any, requests: Sequence[Any], *_args: Any, **_kwargs: Any) -> None:
    """BEFORE SchedulerOutputStreamer.stream_output: by now it is known which requests have finished."""
    if _runner is not None:
        left = [each for each in requests if each.output_ids and each.kv.holds_kv and not each.finished()]
        _runner.begin_next([Going(each.rid, each.kv.req_pool_idx, each.output_ids[-1], each.seqlen - 1) for each in left])


def forget_begun(*_args: Any, **_kwargs: Any) -> None:
    """BEFORE each way of updating the weights."""
    if _runner is not None:
        _runner.forget_begun()
