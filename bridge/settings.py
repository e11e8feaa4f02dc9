"""Every environment variable that this project reads, parsed once into one frozen dataclass.

Nothing heavy is imported here: the module runs at interpreter start when
LIBTT_TPU_COMPAT=1. A value that cannot be used is a SettingsError that names
the variable, the value and what is accepted.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import SettingsError

BACKENDS = ("auto", "libtt", "emulated")
PALLAS = ("interpret", "error")
LOG_LEVELS = ("debug", "info", "warning", "error")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Launched:
    """What a launcher (torchrun, SGLang, a user's script) told this process about its place among others.

    Attributes:
        rank: RANK, from 0.
        world_size: WORLD_SIZE, processes on all hosts together.
        local_rank: LOCAL_RANK, `rank` where it is unset.
        local_world_size: LOCAL_WORLD_SIZE, processes on this host; `world_size` where it is unset.
        master: MASTER_ADDR and MASTER_PORT, None where they are unset.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master: tuple[str, int] | None = None


@dataclass(frozen=True)
class Settings:
    """One field an environment variable; the README's table of options follows this order.

    Attributes:
        compat: LIBTT_TPU_COMPAT, present chips as TPUs (1) or change nothing (0, unset).
        backend: TT_TPU_BACKEND, "auto", "libtt" or "emulated".
        emulated_chips: TT_TPU_EMULATED_CHIPS, how many emulated chips one process drives.
        emulated_memory: TT_TPU_EMULATED_MEMORY, bytes of memory of one emulated chip.
        inner_plugin: TT_TPU_INNER_PLUGIN, a PJRT plugin to use in place of the backend's own.
        tpu_library: TPU_LIBRARY_PATH as the user set it, or None.
        compile_workers: TT_TPU_COMPILE_WORKERS, processes that compile programs.
        cache_dir: TT_TPU_CACHE_DIR, where caches and logs live.
        log_level: TT_TPU_LOG, "debug", "info", "warning" or "error".
        pallas: TT_TPU_PALLAS, what becomes of a Pallas kernel that nothing replaces, "interpret" or "error".
        collective_timeout: TT_TPU_COLLECTIVE_TIMEOUT, seconds that a rank waits for the others.
        symmetric_memory: LIBTT_SYMMETRIC_DRAM_MB in bytes, what libtt sets aside of each chip's memory.
        visible_devices: TT_VISIBLE_DEVICES, the chips that libtt may use, by index or PCI address.
        mesh_graph: TT_MESH_GRAPH_DESC_PATH, tt-metal's description of the mesh.
        base_port: TORCH_TPU_BASE_PORT, rank 0's port on its host, where processes of several hosts meet.
        launched: this process's place among others, None where it is alone.
        mock_cluster: TT_METAL_MOCK_CLUSTER_DESC_PATH, tt-metal's description of chips that are not
            there; libtt compiles for them for real.
    """

    compat: bool = False
    backend: str = "auto"
    emulated_chips: int = 1
    emulated_memory: int = 32 << 30
    inner_plugin: Path | None = None
    tpu_library: Path | None = None
    compile_workers: int = 2
    cache_dir: Path = Path("~/.cache/tt-tpu-bridge")
    log_level: str = "info"
    pallas: str = "interpret"
    collective_timeout: int = 120
    symmetric_memory: int = 0
    visible_devices: str | None = None
    mesh_graph: Path | None = None
    base_port: int = 8070
    launched: Launched | None = None
    mock_cluster: Path | None = None


def parse_size(text: str, variable: str) -> int:
    """Bytes written as "34359738368", "32G", "32GB" or "1.5GiB" (powers of 1024)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size <= 0:
        raise SettingsError(f"{variable}={text!r} is not a size: write bytes or a unit, as in 8G or 512M")
    return size


def _choice(text: str, variable: str, choices: tuple[str, ...]) -> str:
    if text.lower() not in choices:
        raise SettingsError(f"{variable}={text!r} is unknown: use one of {', '.join(choices)}")
    return text.lower()


def _count(text: str, variable: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,3}", text):
        raise SettingsError(f"{variable}={text!r} is not a whole number from 1 to 9999")
    return int(text)


def _rank(text: str, variable: str) -> int:
    if not re.fullmatch(r"\d{1,4}", text):
        raise SettingsError(f"{variable}={text!r} is not a whole number from 0 to 9999")
    return int(text)


def _port(text: str, variable: str) -> int:
    if not re.fullmatch(r"\d{1,5}", text) or not 0 < int(text) < 65536:
        raise SettingsError(f"{variable}={text!r} is not a port: use 1 to 65535")
    return int(text)


def _launched(read) -> Launched | None:
    """The launcher's variables; they count where both RANK and WORLD_SIZE are set."""
    rank, size = read("RANK", _rank, None), read("WORLD_SIZE", _count, None)
    if rank is None or size is None:
        return None
    local_size = read("LOCAL_WORLD_SIZE", _count, size)
    local_rank = read("LOCAL_RANK", _rank, rank if local_size == size else rank % local_size)
    for name, number, limit in (("RANK", rank, size), ("LOCAL_RANK", local_rank, local_size)):
        if number >= limit:
            raise SettingsError(f"{name}={number} of {limit} processes: ranks go from 0 to {limit - 1}")
    address, port = read("MASTER_ADDR", lambda text, _: text, None), read("MASTER_PORT", _port, None)
    return Launched(rank, size, local_rank, local_size, None if None in (address, port) else (address, port))


def _switch(text: str, variable: str) -> bool:
    if text.lower() not in ("0", "1", "", "true", "false", "on", "off"):
        raise SettingsError(f"{variable}={text!r} is neither on nor off: use 1 or 0")
    return text.lower() in ("1", "true", "on")


def load(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings from `environ`; raises SettingsError on the first unusable value."""
    default = Settings()

    def read(variable, parse, fallback):
        text = environ.get(variable, "")
        return fallback if text == "" else parse(text, variable)

    def path(text, _variable):
        return Path(text).expanduser()

    return Settings(
        compat=read("LIBTT_TPU_COMPAT", _switch, default.compat),
        backend=read("TT_TPU_BACKEND", lambda t, v: _choice(t, v, BACKENDS), default.backend),
        emulated_chips=read("TT_TPU_EMULATED_CHIPS", _count, default.emulated_chips),
        emulated_memory=read("TT_TPU_EMULATED_MEMORY", parse_size, default.emulated_memory),
        inner_plugin=read("TT_TPU_INNER_PLUGIN", path, None),
        tpu_library=read("TPU_LIBRARY_PATH", path, None),
        compile_workers=read("TT_TPU_COMPILE_WORKERS", _count, min(2, os.cpu_count() or 1)),
        cache_dir=read("TT_TPU_CACHE_DIR", path, default.cache_dir.expanduser()),
        log_level=read("TT_TPU_LOG", lambda t, v: _choice(t, v, LOG_LEVELS), default.log_level),
        pallas=read("TT_TPU_PALLAS", lambda t, v: _choice(t, v, PALLAS), default.pallas),
        collective_timeout=read("TT_TPU_COLLECTIVE_TIMEOUT", _count, default.collective_timeout),
        symmetric_memory=read("LIBTT_SYMMETRIC_DRAM_MB", lambda t, v: _rank(t, v) << 20, 0),
        visible_devices=read("TT_VISIBLE_DEVICES", lambda t, _: t, None),
        mesh_graph=read("TT_MESH_GRAPH_DESC_PATH", path, None),
        base_port=read("TORCH_TPU_BASE_PORT", _port, default.base_port),
        launched=_launched(read),
        mock_cluster=read("TT_METAL_MOCK_CLUSTER_DESC_PATH", path, None),
    )
