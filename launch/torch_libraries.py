"""Lets a CUDA build of torch be imported where no CUDA library is installed.

Some package indexes carry torch for CUDA only, and its libraries then ask for
gigabytes that nothing here uses. `python -m launch.torch_libraries` puts a
small library beside torch's own for each that is missing: all functions that
torch looks up are there, and each answers "no device" (CUDA's error 100). It
does nothing for a CPU build, or where the CUDA libraries are there.
"""

import importlib.util
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import BridgeError

NO_DEVICE = 100
# Functions of CUDA's libraries that carry no symbol version.
_UNVERSIONED = re.compile(r"(cu|nccl|pnccl|nv)[A-Za-z]*[A-Z]|nvshmem|_ZN?K?\d*nvshmem")


@dataclass(frozen=True)
class Symbol:
    """A symbol that torch's libraries use and none of them defines; the version may be empty."""

    name: str
    version: str


def _lines(*command: str) -> list[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError) as error:
        raise BridgeError(f"{command[0]} failed ({error}): install a C++ compiler and its binutils") from None


def missing_libraries(files: list[Path]) -> set[str]:
    """The libraries that the dynamic linker does not find for `files`."""
    lines = (line for file in files for line in _lines("ldd", str(file)))
    return {line.split()[0] for line in lines if line.endswith("=> not found")}


def version_owners(files: list[Path]) -> dict[str, str]:
    """Symbol version → the library that `files` expect it from."""
    owners, library = {}, ""
    for line in (line for file in files for line in _lines("readelf", "-VW", str(file))):
        if found := re.search(r"File: (\S+)", line):
            library = found[1]
        elif found := re.search(r"Name: (\S+)\s+Flags", line):
            owners[found[1]] = library
    return owners


def undefined_symbols(files: list[Path]) -> set[Symbol]:
    """What `files` look up and do not define among themselves."""
    used, defined = set(), set()
    for line in (line for file in files for line in _lines("readelf", "--dyn-syms", "-W", str(file))):
        words = line.split()
        if len(words) < 8 or not words[0].endswith(":"):
            continue
        name, _, version = words[7].partition("@")
        if words[6] != "UND":
            defined.add(name)
        elif words[4] == "GLOBAL":
            used.add(Symbol(name, version))
    return {symbol for symbol in used if symbol.version or symbol.name not in defined}


def contents(missing: set[str], symbols: set[Symbol], owners: dict[str, str]) -> dict[str, set[Symbol]]:
    """Which symbols each missing library must have; those without a version may be in any of them."""
    libraries = {library: set() for library in sorted(missing)}
    anywhere = min(missing)
    for symbol in symbols:
        owner = owners.get(symbol.version) if symbol.version else anywhere
        if owner in libraries and (symbol.version or _UNVERSIONED.match(symbol.name)):
            libraries[owner].add(symbol)
    return libraries


def build(library: Path, symbols: set[Symbol]) -> None:
    """Compile `library`, in which every one of `symbols` is a function that returns NO_DEVICE."""
    source = "".join(
        f'long f{i}(void) __asm__("{name}"); long f{i}(void) {{ return {NO_DEVICE}; }}\n'
        for i, name in enumerate(sorted({symbol.name for symbol in symbols}))
    )
    versions = defaultdict(list)
    for symbol in symbols:
        versions[symbol.version].append(symbol.name)
    versions.pop("", None)
    script = "".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in versions.items())
    with tempfile.TemporaryDirectory() as folder:
        code, map_file = Path(folder, "stub.c"), Path(folder, "stub.map")
        code.write_text(source)
        map_file.write_text(script)
        options = [f"-Wl,--version-script={map_file}"] if script else []
        _lines("cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", *options, "-o", str(library), str(code))


def complete(torch: Path) -> list[str]:
    """Build what is missing beside the libraries of the torch package in folder `torch`; returns their names."""
    files = [*sorted(torch.glob("lib/*.so*")), *sorted(torch.glob("_C*.so"))]
    missing = missing_libraries(files)
    if not missing:
        return []
    for name, symbols in contents(missing, undefined_symbols(files), version_owners(files)).items():
        build(torch / "lib" / name, symbols)
    return sorted(missing)


def main() -> int:
    """Complete the torch of this environment and say what was done; 1 with a message where that fails."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        print("torch is not installed: pip install --no-deps -r requirements.txt", file=sys.stderr)
        return 1
    try:
        made = complete(Path(spec.origin).parent)
    except BridgeError as error:
        print(f"torch's CUDA libraries are missing, and nothing could be put in their place: {error}", file=sys.stderr)
        return 1
    if made:
        print(f"torch is a CUDA build without its libraries; made stand-ins for {', '.join(made)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
