"""SIGTERM ends the server within seconds.

SGLang's own watchdog looks every five seconds, and waits for running requests
without end. What it leaves behind, crash.py removes.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

# Seconds: between two looks; for running requests to end by themselves; for them to
# end once aborted; for the scheduler, which may be in the middle of a program.
_LOOK, _GRACE, _ABORT, _SCHEDULER = 0.1, 2.0, 0.5, 3

logger = logging.getLogger(__name__)


async def _until_idle(manager: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while manager.rid_to_state and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK)


async def stop_soon(watchdog: Callable[[Any], Awaitable[None]], manager: Any) -> None:
    """AROUND TokenizerManager.sigterm_watchdog."""
    from sglang.srt.managers import tokenizer_manager

    while not manager.gracefully_exit:
        await asyncio.sleep(_LOOK)
    await _until_idle(manager, _GRACE)
    if manager.rid_to_state:
        logger.warning("Aborting %d requests that did not end within %g s", len(manager.rid_to_state), _GRACE)
        manager.abort_request(abort_all=True)
        await _until_idle(manager, _ABORT)
        manager.rid_to_state.clear()
    tokenizer_manager._SCHEDULER_EXIT_TIMEOUT_SECS = _SCHEDULER
    await watchdog(manager)
