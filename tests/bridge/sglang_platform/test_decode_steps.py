"""Steps that are begun early, under a scheduler that admits, finishes, aborts and preempts requests at random.

The chip here is a table of pages that remembers tokens, and a model whose logits depend on all tokens of a
request. A row that served for another request, token or page would give other logits.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.sglang_platform.decode_steps import DecodeSteps

PAGE, PAGES, WIDTH = 4, 7, 3
VOCABULARY = 2  # so that other requests often have the same token


def logits(tokens: list[int]) -> torch.Tensor:
    """Of a request, from all of its tokens in their order."""
    return torch.from_numpy(np.random.default_rng(np.array(tokens)).random(VOCABULARY, dtype=np.float32))


class Chip:
    """Pages of tokens, written and read in the order in which programs are started."""

    def __init__(self):
        self.pages = np.full((PAGES, PAGE), -1)
        self.started: list[int] = []

    def decode(self, data: np.ndarray):
        """What DecodeSteps wants to start: rows of token, position, pages."""
        self.started.append(len(data))
        rows = []
        for token, position, *pages in data.tolist():
            self.pages[pages[position // PAGE], position % PAGE] = token
            rows.append(logits([self.pages[pages[i // PAGE], i % PAGE] for i in range(position + 1)]))
        return lambda: torch.stack(rows)

    def prefill(self, request: "Request") -> None:
        for i, token in enumerate(request.tokens):
            self.pages[request.pages[i // PAGE], i % PAGE] = token


class Request:
    """Tokens, and the pages that hold all but the last once they have been run."""

    def __init__(self, rid: str, tokens: list[int]):
        self.rid, self.tokens, self.pages = rid, tokens, []

    @property
    def row(self) -> list[int]:
        return [self.tokens[-1], len(self.tokens) - 1, *self.pages, *[0] * (WIDTH - len(self.pages))]


class Scheduler:
    """Requests that come and go; each decode batch is checked."""

    def __init__(self):
        self.chip = Chip()
        self.steps = DecodeSteps(self.chip.decode)
        self.free = list(range(1, PAGES))
        self.running: list[Request] = []
        self.preempted: list[Request] = []

    def take_pages(self, request: Request, count: int) -> bool:
        while len(request.pages) < count and self.free:
            request.pages.append(self.free.pop(0))
        return len(request.pages) >= count

    def leave(self, request: Request) -> None:
        self.running.remove(request)
        self.free = request.pages + self.free  # so that the next one gets the same
        request.pages = []

    def admit(self, request: Request) -> None:
        if not self.take_pages(request, len(request.tokens) // PAGE + 1):
            self.free, request.pages = request.pages + self.free, []
            return
        self.steps.forget([request.rid])
        self.chip.prefill(request)
        request.tokens.append(int(logits(request.tokens).argmax()))
        self.running.append(request)

    def decode(self, begin: bool) -> None:
        for request in list(self.running):
            if len(request.tokens) >= WIDTH * PAGE or not self.take_pages(request, (len(request.tokens) - 1) // PAGE + 1):
                self.leave(request)
        if not self.running:
            return
        batch = self.running
        result = self.steps.run([each.rid for each in batch], np.array([each.row for each in batch], dtype=np.int32))
        assert torch.equal(result, torch.stack([logits(each.tokens) for each in batch]))
        for request, row in zip(batch, result, strict=True):
            request.tokens.append(int(row.argmax()))
        if begin:
            going = [each for each in batch if len(each.tokens) - 1 < len(each.pages) * PAGE]
            self.steps.begin([each.rid for each in going], np.array([each.row for each in going], dtype=np.int32))


PROMPTS = st.lists(st.integers(0, VOCABULARY - 1), min_size=WIDTH * PAGE, max_size=WIDTH * PAGE)
ACTIONS = st.tuples(st.sampled_from("dddaafprss"), st.integers(0, 2), st.booleans(), PROMPTS)


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTIONS, min_size=40, max_size=60))
def test_every_row_is_the_requests_own(actions):
    """d: decode, and perhaps begin the next step; a: admit under one of few ids; f: finish or abort;
    p: preempt; r: resume, with the tokens made so far; s: finish, and admit one as long, perhaps under the same id."""
    scheduler = Scheduler()
    for action, number, flag, prompt in actions:
        running = scheduler.running
        if action == "d":
            scheduler.decode(begin=flag)
        elif action == "a" and not any(each.rid == str(number) for each in running + scheduler.preempted):
            scheduler.admit(Request(str(number), prompt[: 1 + number]))
        elif action in "fps" and running:
            request = running[number % len(running)]
            scheduler.leave(request)
            if action == "s":
                rid = request.rid if flag else request.rid + "'"
                scheduler.admit(Request(rid, prompt[: len(request.tokens) - 1]))
            if action == "p":
                scheduler.preempted.append(request)
        elif action == "r" and scheduler.preempted:
            scheduler.admit(scheduler.preempted.pop(0))


@pytest.fixture
def scheduler():
    """Three requests that decode, with a step begun for all."""
    scheduler = Scheduler()
    for rid in "abc":
        scheduler.admit(Request(rid, [1, 2]))
    scheduler.running.reverse()
    scheduler.decode(begin=True)
    return scheduler


def test_what_has_begun_is_not_run_again(scheduler):
    """The whole batch, and what is left of it when one has ended."""
    assert scheduler.chip.started == [3, 3]
    scheduler.leave(scheduler.running[1])
    scheduler.decode(begin=False)
    assert scheduler.chip.started == [3, 3]


def test_another_row_of_the_same_request_is_run(scheduler):
    """Rows serve only as they are: a token that the host has changed is run."""
    scheduler.running[1].tokens[-1] ^= 1
    scheduler.decode(begin=False)
    assert scheduler.chip.started == [3, 3, 1]


def test_nothing_serves_after_the_weights_have_changed(scheduler):
    """What began before is run again, with the new ones."""
    scheduler.steps.forget_all()
    scheduler.decode(begin=False)
    assert scheduler.chip.started == [3, 3, 3]


def test_a_request_that_came_meanwhile_is_run_alone(scheduler):
    scheduler.admit(Request("d", [3]))
    scheduler.decode(begin=False)
    assert scheduler.chip.started == [3, 3, 1]


def test_nothing_begins_for_requests_of_another_batch(scheduler):
    """As when a prompt's first token is sent off, or the same step's twice."""
    scheduler.steps.begin(["a"], np.array([[1, 2, 3, 0, 0]], dtype=np.int32))
    scheduler.admit(Request("d", [3]))
    scheduler.steps.begin(["d"], np.array([[1, 1, 4, 0, 0]], dtype=np.int32))
    assert scheduler.chip.started == [3, 3]
