"""Interprets a Pallas kernel that nothing replaces: its `pallas_call` is lowered to plain StableHLO, without Mosaic.

In force wherever a program is lowered for a TPU or for the chip's own platform: in jit, in
jax.export and in torch_tpu's jax_op. Programs for other platforms are JAX's own matter.
Interpreting computes the same numbers one grid step at a time, which is slow, so each
kernel is named once.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from kernels_replacements.errors import KernelError, KernelWarning
from kernels_replacements.import_hooks import when_imported
from kernels_replacements.registry import used

PLATFORMS = frozenset(("tpu", "tt"))
MODES = ("interpret", "error")
_INSTEAD = "register a replacement with kernels_replacements.registry.replaces"
_named: set[str] = set()


def install(mode: str) -> None:
    """Lower kernels for the chip by interpreting them, or with mode "error" not at all; imports nothing."""
    when_imported("jax._src.pallas.pallas_call", functools.partial(_install_kernels, mode))
    when_imported("jax._src.pallas.mpmd", _install_cores)


def _install_kernels(mode: str, pallas_call: ModuleType) -> None:
    from jax.interpreters import mlir

    # By its name in the module as well: kernels of several cores, where they can be told as a grid, end there.
    pallas_call._pallas_call_lowering = functools.partial(_lower, pallas_call._pallas_call_lowering, mode)
    mlir.register_lowering(pallas_call.pallas_call_p, pallas_call._pallas_call_lowering)


def _install_cores(mpmd: ModuleType) -> None:
    from jax.interpreters import mlir

    mlir.register_lowering(mpmd.mpmd_map_p, functools.partial(_lower_cores, mpmd._mpmd_map_lowering))


def _for_chip(context: Any) -> bool:
    return not PLATFORMS.isdisjoint(context.platforms or context.module_context.platforms)


def _lower(otherwise: Callable, mode: str, context: Any, *operands: Any, interpret: Any, **parameters: Any) -> Any:
    """The lowering rule of pallas_call."""
    if interpret or not _for_chip(context):
        return otherwise(context, *operands, interpret=interpret, **parameters)
    from jax._src.pallas import hlo_interpreter
    from jax.interpreters import mlir

    kernel = describe(parameters["jaxpr"], parameters["name"])
    if mode == "error":
        raise KernelError(f"{kernel} has no replacement, and TT_TPU_PALLAS=error forbids to interpret it: {_INSTEAD}")
    unknown = sorted(set(_uninterpretable(parameters["jaxpr"])))
    if unknown:
        raise KernelError(f"{kernel} cannot be interpreted: it uses {', '.join(unknown)}, which only a TPU has; {_INSTEAD}")
    _warn(kernel)
    run = functools.partial(hlo_interpreter.pallas_call_hlo_interpret, **parameters)
    try:
        return mlir.lower_fun(run, multiple_results=True)(context, *operands)
    except KernelError:
        raise
    except Exception as error:
        where = _primitive_of(error)
        raise KernelError(f"{kernel} cannot be interpreted: JAX fails{where}: {error}; {_INSTEAD}") from error


def _lower_cores(otherwise: Callable, context: Any, *operands: Any, jaxprs: Any, **parameters: Any) -> Any:
    """The lowering rule of mpmd_map, kernels of several cores, SparseCore's among them: one core after the other."""
    if parameters["interpret"] or not _for_chip(context):
        return otherwise(context, *operands, jaxprs=jaxprs, **parameters)
    from jax._src.pallas import mpmd

    try:
        return mpmd._mpmd_map_fallback_lowering(context, *operands, jaxprs=jaxprs, **parameters)
    except NotImplementedError as error:
        kernel = describe(jaxprs[0], parameters["name"])
        raise KernelError(f"{kernel} cannot be interpreted: {error}; {_INSTEAD}") from error


def describe(jaxpr: Any, name: str | None) -> str:
    """ "Pallas kernel NAME of module MODULE" of a kernel's jaxpr."""
    info = jaxpr.debug_info
    file = info.func_src_info.partition(" at ")[2].rpartition(":")[0]
    modules = (m for m, module in list(sys.modules.items()) if getattr(module, "__file__", None) == file)
    return f"Pallas kernel {name or info.func_name} of module {next(modules, file or 'unknown')}"


def _warn(kernel: str) -> None:
    used[f"{kernel.removeprefix('Pallas kernel ')} (interpreted)"] += 1
    if kernel not in _named:
        _named.add(kernel)
        warnings.warn(f"{kernel} has no replacement and is interpreted, which is slow: {_INSTEAD}", KernelWarning, stacklevel=2)


def _equations(jaxpr: Any) -> Iterator[Any]:
    from jax._src import core

    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from _equations(inner)


def _uninterpretable(jaxpr: Any) -> Iterator[str]:
    """Names of primitives that have neither a meaning in StableHLO nor one on memory that is passed by value."""
    from jax._src.interpreters import mlir
    from jax._src.state import discharge

    known = (mlir._lowerings, mlir._platform_specific_lowerings["cpu"], discharge._discharge_rules,
             discharge._partial_discharge_rules)  # fmt: skip
    for equation in _equations(jaxpr):
        primitive = equation.primitive
        if not any(primitive in rules for rules in known) and not hasattr(primitive, "to_lojax"):
            yield primitive.name


def _primitive_of(error: BaseException) -> str:
    """ " at PRIMITIVE", the innermost one that was being interpreted when the error was raised."""
    found, trace = "", error.__traceback__
    while trace is not None:
        equation = trace.tb_frame.f_locals.get("eqn")
        if hasattr(equation, "primitive"):
            found = f" at {equation.primitive.name}"
        trace = trace.tb_next
    return found
