"""The end of a server, in the process that answers HTTP."""

import asyncio
import sys
import time
import types

import pytest

from bridge.sglang_platform import shutdown


class Manager:
    """As much of SGLang's TokenizerManager as the watchdog looks at."""

    def __init__(self, running: int):
        self.gracefully_exit = False
        self.rid_to_state = {str(i): None for i in range(running)}
        self.aborted = False

    def abort_request(self, abort_all: bool):
        self.aborted = abort_all


@pytest.fixture
def stopped(monkeypatch):
    """stopped(running, ends_after): a manager that SIGTERM reached, after its watchdog returned, and the seconds taken."""
    for name in ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.managers.tokenizer_manager"):
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)

    async def watchdog(manager):
        assert not manager.rid_to_state

    def run(running: int, ends_after: float | None = None):
        manager = Manager(running)

        async def serve():
            task = asyncio.create_task(shutdown.stop_soon(watchdog, manager))
            await asyncio.sleep(0.05)
            manager.gracefully_exit = True
            if ends_after is not None:
                await asyncio.sleep(ends_after)
                manager.rid_to_state.clear()
            await task

        began = time.monotonic()
        asyncio.run(serve())
        return manager, time.monotonic() - began

    return run


def test_an_idle_server_stops_at_once(stopped):
    """Without requests the watchdog goes on within a fraction of a second."""
    _, seconds = stopped(running=0)
    assert seconds < 1


def test_running_requests_may_end_by_themselves(stopped):
    """A request that ends within the grace is not aborted."""
    manager, seconds = stopped(running=2, ends_after=0.5)
    assert not manager.aborted and seconds < 1.5


def test_requests_that_go_on_are_aborted(stopped):
    """A request that does not end is aborted, and does not keep the server."""
    manager, seconds = stopped(running=1)
    assert manager.aborted and seconds < 4
