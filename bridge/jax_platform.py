"""The chip as a platform of JAX: with LIBTT_TPU_COMPAT=1, `jax.devices()` are the bridge's TPUs.

JAX finds `initialize` through the entry point `jax_plugins` and calls it when it looks for
platforms. JAX_PLATFORMS=tt asks for this one alone, JAX_PLATFORMS=cpu leaves it out.
"""

import os
import sys

from bridge import backend
from bridge.errors import BridgeError
from bridge.settings import load

PLATFORM = "tt"
_PRIORITY = 400  # above JAX's own platforms, as of a plugin that somebody installed


def initialize() -> None:
    """Register the platform, if chips are presented as TPUs.

    In a program of torch_tpu the chip is torch's, and JAX, which only writes kernels
    there, gets it if JAX_PLATFORMS says so.
    """
    try:
        if not load().compat:
            return
    except BridgeError as error:
        _refuse(str(error))
        return
    asked = PLATFORM in os.environ.get("JAX_PLATFORMS", "").split(",")
    if "torch_tpu" in sys.modules and not asked:
        return
    from jax._src import xla_bridge

    xla_bridge.register_plugin(PLATFORM, priority=_PRIORITY, library_path=str(backend.PLUGIN))


def _refuse(message: str) -> None:
    """Let every use of JAX raise RuntimeError: an exception here it would only log, and go on with the CPU."""
    from jax._src import xla_bridge

    def fail():
        raise RuntimeError(f"tt-tpu: error: {message}")

    xla_bridge.register_backend_factory(PLATFORM, fail, priority=_PRIORITY, fail_quietly=False)
