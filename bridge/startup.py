"""Called by the .pth at interpreter start when LIBTT_TPU_COMPAT is on: makes the chip a TPU.

Imports nothing heavy and touches no device: it sets the environment that
torch_tpu reads, and leaves hooks on the modules that must be told more.
"""

import os
import sys

from bridge import backend as backends
from bridge import mesh, torch_tpu_hooks
from bridge.errors import BridgeError
from bridge.settings import Settings, load
from kernels_replacements import registry
from kernels_replacements.import_hooks import provide, when_imported

_ANNOUNCED = "TT_TPU_ANNOUNCED"


def start() -> None:
    """Prepare this process and those that it starts.

    A setting that cannot be used must not break programs that need no chip
    (pip, `tt-tpu doctor`), so the error waits until torch_tpu is imported.
    """
    try:
        settings = load()
        if not settings.compat:
            return
        backend = backends.resolve(settings)
        added = mesh.environment(settings, backend)
    except BridgeError as error:
        message = f"tt-tpu: error: {error}"
        # In torch_tpu's place and not after it: without a plugin it aborts the process.
        provide("torch_tpu", lambda _module: sys.exit(message), instead=True)
        return
    os.environ.update(added)
    ours = _set_library(settings, backend)
    os.environ["TT_TPU_PLUGIN_CONFIG"] = backends.plugin_config(backend, settings)
    _set_caches(settings, backend)
    torch_tpu_hooks.install(backend)
    registry.install(pallas=settings.pallas, report=settings.log_level in ("debug", "info"))
    when_imported("torch_tpu", lambda _module: _announce(settings, backend, ours))
    _prepare_sglang()


def _set_library(settings: Settings, backend: backends.Backend) -> bool:
    """Point torch_tpu to our plugin, unless the user has named another one.

    libtt's own .pth, which runs before ours, names libtt as a default: that is no user's choice.
    """
    if settings.tpu_library not in (None, backends.PLUGIN, backend.inner_library):
        return False
    os.environ["TPU_LIBRARY_PATH"] = str(backends.PLUGIN)
    return True


def _set_caches(settings: Settings, backend: backends.Backend) -> None:
    """Give Inductor's caches a folder of this fingerprint: they keep executables whose keys do not name the plugin."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(settings.cache_dir / backend.fingerprint / "inductor"))


def _announce(settings: Settings, backend: backends.Backend, ours: bool) -> None:
    """Say once for a tree of processes what stands behind the TPU."""
    if _ANNOUNCED in os.environ or settings.log_level in ("warning", "error"):
        return
    os.environ[_ANNOUNCED] = "1"
    if not ours:
        line = f"TPU_LIBRARY_PATH={settings.tpu_library} is set: that plugin is used, not the bridge's"
    elif backend.name == "emulated":
        line = f"{backend.reason}: an emulated {backend.chips[0].board} stands in ({backend.inner_version} of XLA's CPU plugin)"
    else:
        line = f"{backend.reason}: using libtt {backend.inner_version}"
    print(f"tt-tpu: {line}", file=sys.stderr, flush=True)


def _prepare_sglang() -> None:
    """SGLang imports packages that a chip does not need before it asks any platform."""

    def prepare(_module) -> None:
        from bridge.sglang_platform.import_stubs import prepare_imports

        prepare_imports()

    # The first module that the package sglang imports: nothing has asked for triton yet.
    when_imported("sglang.srt.environ", prepare)
