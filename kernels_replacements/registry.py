"""Puts each replacement in its original's place, right after the original's module has been imported.

An original is a function of a known name and parameter list; the module is where it is
expected, and a fork that moved the file is recognised by name and parameters. Nothing
heavy is imported before an original is: `install` runs at interpreter start.

A user or a fork adds its own in three lines:

    @replaces("my_fork.kernels.attention", "ragged_attention")
    def ragged_attention(q, pages, lengths, *, scale):
        return ...
"""

import atexit
import functools
import importlib
import inspect
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from kernels_replacements.errors import KernelWarning, NotReplaced
from kernels_replacements.import_hooks import when_imported, when_one_imported

PACKAGE = "kernels_replacements"
# Where a fork keeps kernels, and so where an original may have moved to.
_KERNEL_MODULE = re.compile(r"kernel|pallas|attention|megablox", re.IGNORECASE)
# Calls of replacements and interpreted kernels, by what was called; a program counts once, when it is traced.
used: Counter[str] = Counter()


@dataclass(frozen=True)
class Replacement:
    """One original and what stands in for it.

    Attributes:
        module: where the original is, "vllm_torchtpu.kernels.router_topk".
        function: its name there.
        by: the function in its place, or "family:name" of a module of this package.
        calls: the `tt.*` calls that it makes; none if it is composed of plain JAX.
        package: the distribution that the original belongs to.
        version: the version of it that the replacement was checked against.
        moved: whether the same name and parameters in another module are the same kernel.
    """

    module: str
    function: str
    by: str | Callable[..., Any]
    calls: tuple[str, ...] = ()
    package: str = ""
    version: str = ""
    moved: bool = True

    @property
    def original(self) -> str:
        return f"{self.module}.{self.function}"

    def load(self) -> Callable[..., Any]:
        """The function that stands in."""
        if not isinstance(self.by, str):
            return self.by
        family, name = self.by.split(":")
        return getattr(importlib.import_module(f"{PACKAGE}.{family}"), name)


_installed: list[Replacement] = []
_warned: set[str] = set()


def replaces(
    module: str, function: str, *, calls: tuple[str, ...] = (), package: str = "", version: str = "", moved: bool = True
) -> Callable[[Callable], Callable]:
    """Register the decorated function in place of `module.function`, whether or not that is imported yet.

    The function takes the original's parameters, by the same names and in the same
    order. An original with others is left as it is, and a warning says so.
    """

    def register(by: Callable) -> Callable:
        add(Replacement(module, function, by, calls, package, version, moved))
        return by

    return register


def add(replacement: Replacement) -> None:
    """Put one replacement in place, now or when its original is imported."""
    if any(known.original == replacement.original and known.by == replacement.by for known in _installed):
        return
    _installed.append(replacement)
    when_imported(replacement.module, functools.partial(_replace, replacement.original))


def install(*, pallas: str = "interpret", report: bool = True) -> None:
    """Put every known replacement in place, once a process, and the fallback for all other kernels.

    Args:
        pallas: what becomes of a Pallas kernel that nothing replaces, "interpret" or "error".
        report: whether to print, when the process ends, what its programs used.
    """
    from kernels_replacements import pallas_fallback
    from kernels_replacements.originals import REPLACEMENTS

    if _installed[: len(REPLACEMENTS)] == list(REPLACEMENTS):
        return
    pallas_fallback.install(pallas)
    for replacement in REPLACEMENTS:
        add(replacement)
    when_one_imported(_may_hold_kernels, _replace_moved)
    if report:
        atexit.register(_report)


def _candidates(original: str) -> list[Replacement]:
    """What may stand in for one original: several where its parameters changed between versions; the last one first."""
    return [known for known in reversed(_installed) if known.original == original]


def parameters(function: Callable) -> tuple[tuple[str, ...], frozenset[str]]:
    """Names of a function's positional and of its keyword parameters: what makes two versions of a kernel the same."""
    found = inspect.signature(function).parameters.values()
    positional = tuple(p.name for p in found if p.kind is not p.KEYWORD_ONLY)
    return positional, frozenset(p.name for p in found if p.kind is p.KEYWORD_ONLY)


def _replace(original: str, module: ModuleType) -> None:
    """Replace one original in its own module, if one of its replacements takes its parameters."""
    name = original.rpartition(".")[2]
    function = getattr(module, name, None)
    if function is None or hasattr(function, "__tt_tpu_replaces__"):
        return
    found = parameters(function)
    for replacement in _candidates(original):
        if parameters(replacement.load()) == found:
            _put(replacement, module, name, function)
            return
    listed = ", ".join((*found[0], *sorted(found[1])))
    _warn(
        f"{original}({listed}) has other parameters than the versions that are replaced: it is interpreted instead,"
        " which is slow. Register a replacement with kernels_replacements.registry.replaces"
    )


def _warn(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, KernelWarning, stacklevel=3)


def _may_hold_kernels(name: str) -> bool:
    return _KERNEL_MODULE.search(name) is not None and not name.startswith((PACKAGE, "jax._src", "bridge."))


def _replace_moved(module: ModuleType) -> None:
    """Replace the functions that a module defines under an original's name and parameters."""
    if "jax" not in sys.modules:  # then there is no kernel in it either
        return
    for replacement in {known.function: known for known in _installed if known.moved}.values():
        function = vars(module).get(replacement.function)
        if not callable(function) or getattr(function, "__module__", None) != module.__name__:
            continue
        if hasattr(function, "__tt_tpu_replaces__"):
            continue
        for known in reversed(_installed):
            if known.moved and known.function == replacement.function and _same(known.load(), function):
                _put(known, module, known.function, function)
                break


def _same(replacement: Callable, function: Callable) -> bool:
    try:
        return parameters(replacement) == parameters(function)
    except (TypeError, ValueError):  # a builtin or a class: no kernel
        return False


def _put(replacement: Replacement, module: ModuleType, name: str, original: Callable) -> None:
    """Set the replacement in the module, and wherever the original had been imported to before."""
    by = replacement.load()
    signature = inspect.signature(original)
    shown = f"{module.__name__}.{name}"

    # Signature and annotations stay the original's: torch_tpu reads both. So do its defaults.
    @functools.wraps(original)
    def replaced(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.arguments.get("interpret"):  # the caller asks for the original, interpreted
            return original(*args, **kwargs)
        try:
            out = by(*bound.args, **bound.kwargs)
        except NotReplaced as reason:
            _warn(f"{shown}: {reason}: the original is interpreted for this, which is slow")
            return original(*args, **kwargs)
        used[shown] += 1
        return out

    replaced.__tt_tpu_replaces__ = replacement
    setattr(module, name, replaced)
    for other in list(sys.modules.values()):
        for attribute, value in list(getattr(other, "__dict__", {}).items()):
            if value is original and other is not sys.modules[__name__]:
                setattr(other, attribute, replaced)


def _report() -> None:
    """Say what this process used, if it used any kernel."""
    if used:
        counts = ", ".join(f"{name} ×{count}" for name, count in sorted(used.items()))
        print(f"tt-tpu: kernels that this process's programs use (times traced): {counts}", file=sys.stderr, flush=True)
