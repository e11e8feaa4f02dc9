"""Which inner plugin stands behind the bridge: libtt on silicon, XLA's CPU plugin for an emulated chip.

`resolve` chooses and checks; what it found goes to the C++ plugin as lines of
key=value, in TT_TPU_PLUGIN_CONFIG or printed by `python -m bridge.backend`.
"""

import hashlib
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from bridge import __version__, chips
from bridge.compiler.fingerprint import cpu_fingerprint, passes_fingerprint
from bridge.errors import BackendError, BridgeError
from bridge.settings import Settings, load

PLUGIN = Path(__file__).parent / "plugin" / "libtt_tpu_pjrt.so"
DEVICE_KIND = "TPU v5 lite"
# The newest StableHLO that the compiler's MLIR (jaxlib 0.10.2) reads; a test asks jaxlib itself.
STABLEHLO_VERSION = "1.17.0"


@dataclass(frozen=True)
class InnerPlugin:
    """A PJRT plugin from PyPI: its distribution, its library's file name, the version that was tested."""

    distribution: str
    library: str
    tested: str


INNER_PLUGINS = {
    "emulated": InnerPlugin("lammps-jax-pjrt-cpu", "pjrt_c_api_cpu_plugin.so", "0.11.2"),
    "libtt": InnerPlugin("jax-tt-plugin", "libtt.so", "0.1.3"),
}


@dataclass(frozen=True)
class Backend:
    """What was chosen.

    Attributes:
        name: "emulated" or "libtt".
        reason: why this one, as a clause for a log line.
        inner_library: the inner PJRT plugin's file.
        inner_version: its distribution's version, or "unknown" for a file that the user named.
        chips: the chips it drives.
        fingerprint: changes with everything that a compiled program depends on.
    """

    name: str
    reason: str
    inner_library: Path
    inner_version: str
    chips: tuple[chips.Chip, ...]
    fingerprint: str

    @property
    def platform_version(self) -> str:
        """What the client says it really is."""
        kind = f"emulated {self.chips[0].board}" if self.name == "emulated" else f"libtt {self.inner_version}"
        return f"tt-tpu-bridge {__version__}, {kind}, build {self.fingerprint}"


def resolve(settings: Settings) -> Backend:
    """Choose the backend and find its inner plugin.

    Raises:
        BackendError: no chips for libtt, the plugin is not built, or the inner
            plugin is missing or of a version that was not tested.
    """
    if not PLUGIN.exists():
        raise BackendError(f"the bridge's plugin is not built ({PLUGIN.name} is missing): run `pip install .` in the project")
    name, reason, found = _choose(settings)
    library, version = _inner_plugin(name, settings)
    return Backend(name, reason, library, version, found, _fingerprint(name, library, version))


def _choose(settings: Settings) -> tuple[str, str, tuple[chips.Chip, ...]]:
    if settings.backend == "emulated":
        return "emulated", "TT_TPU_BACKEND=emulated", chips.emulated(settings)
    if settings.mock_cluster is not None and settings.backend == "libtt":
        return "libtt", f"mock cluster {settings.mock_cluster}", chips.mocked(settings.mock_cluster)[:1]
    silicon = chips.silicon()
    if silicon:
        return "libtt", f"{len(silicon)} chip(s) under {chips.DEVICES}", silicon[:1]
    if settings.backend == "libtt":
        raise BackendError(
            f"TT_TPU_BACKEND=libtt, but there is no chip under {chips.DEVICES}: install Tenstorrent's driver "
            "(tt-kmd) and look with tt-smi, or use TT_TPU_BACKEND=emulated"
        )
    return "emulated", f"no chip under {chips.DEVICES}", chips.emulated(settings)


def _inner_plugin(name: str, settings: Settings) -> tuple[Path, str]:
    if settings.inner_plugin is not None:
        if not settings.inner_plugin.is_file():
            raise BackendError(f"TT_TPU_INNER_PLUGIN={settings.inner_plugin} is not a file: name a PJRT plugin, or unset it")
        return settings.inner_plugin.resolve(), "unknown"
    plugin = INNER_PLUGINS[name]
    wanted = f"{plugin.distribution}=={plugin.tested}"
    try:
        distribution = metadata.distribution(plugin.distribution)
    except metadata.PackageNotFoundError:
        raise BackendError(f"the inner plugin of backend {name} is not installed: pip install --no-deps {wanted}") from None
    if distribution.version != plugin.tested:
        raise BackendError(
            f"{plugin.distribution} {distribution.version} was not tested with this bridge: pip install --no-deps "
            f"{wanted}, or set TT_TPU_INNER_PLUGIN to its library to use it at your own risk"
        )
    for file in distribution.files or ():
        if file.name == plugin.library:
            return Path(str(distribution.locate_file(file))), distribution.version
    raise BackendError(f"{plugin.distribution} {distribution.version} holds no {plugin.library}: reinstall {wanted}")


def _fingerprint(name: str, library: Path, version: str) -> str:
    """16 hexadecimal digits; a plugin that the user named is told apart by its size and time of change."""
    stat = library.stat()
    identity = (name, version, stat.st_size, stat.st_mtime_ns if version == "unknown" else 0)
    parts = (__version__, *map(str, identity), passes_fingerprint(), cpu_fingerprint())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def plugin_config(backend: Backend, settings: Settings) -> str:
    """The lines that bridge/plugin/config.cc reads."""
    values = {
        "backend": backend.name,
        "inner_library": backend.inner_library,
        "platform_version": backend.platform_version,
        "device_kind": DEVICE_KIND,
        "fingerprint": backend.fingerprint,
        "stablehlo_version": STABLEHLO_VERSION,
        "chips": len(backend.chips),
        "memory_bytes": max(0, backend.chips[0].memory - settings.symmetric_memory),
        "log_level": settings.log_level,
        "collective_timeout": settings.collective_timeout,
        "compile_workers": settings.compile_workers,
        "python": sys.executable,
    }
    return "".join(f"{key}={value}\n" for key, value in values.items())


def main() -> int:
    """Print the plugin's configuration; for a process that the .pth has not prepared."""
    try:
        settings = load()
        sys.stdout.write(plugin_config(resolve(settings), settings))
        return 0
    except BridgeError as error:
        print(error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
