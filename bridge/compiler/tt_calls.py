"""The `tt.*` calls on their way to a chip: opened for the emulated one, spelled for libtt.

A kernel replacement writes one kind of call, a typed FFI custom call. The
emulated chip gets the body of the JAX function that says what the call
computes (bridge/emulator); libtt gets the attributes where it looks for them.
"""

import functools

from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs._jax_mlir_ext import inlined_func_call

from bridge.compiler import module as modules
from bridge.compiler.composites import inline_composites
from bridge.errors import CompileError

PREFIX = "tt."
COMPOSITE_PREFIX = "tt_bridge."  # of composites of calls, see bridge/emulator/calls.py
# What libtt 0.1.3 lowers; the emulator knows the same, see bridge/emulator/calls.py.
LIBTT_CALLS = frozenset(
    f"{PREFIX}{name}"
    for name in (
        "paged_scaled_dot_product_attention_decode", "chunked_scaled_dot_product_attention",
        "scaled_dot_product_attention", "paged_flash_mla_decode", "flash_mla_prefill", "paged_update_cache",
        "paged_fill_cache", "state_pool_update", "gated_delta_rule", "gated_delta_decode", "causal_conv1d_update",
        "fused_moe_ep", "sparse_matmul", "sampling", "mark_argument", "weight_dtype_override",
    )
)  # fmt: skip
# Calls whose attributes libtt reads from the operation's frontend attributes, as strings.
_METADATA_CALLS = frozenset(
    ("tt.scaled_dot_product_attention", "tt.paged_flash_mla_decode", "tt.flash_mla_prefill", "tt.sparse_matmul",
     "tt.mark_argument")
)  # fmt: skip
# Where typed FFI attributes stand: in StableHLO's place, and in the one that JAX still writes.
_TYPED = ("backend_config", "mhlo.backend_config")


def target_of(call: ir.OpView) -> str:
    """The name that a custom call calls."""
    return ir.StringAttr(call.attributes["call_target_name"]).value


def tt_calls(module: ir.Module) -> list[ir.OpView]:
    """The module's `tt.*` calls."""
    return [call for call in modules.operations(module, "stablehlo.custom_call") if target_of(call).startswith(PREFIX)]


def attributes_of(call: ir.OpView) -> dict[str, bool | int | float | str]:
    """A call's attributes as Python values, whether typed FFI attributes or strings of frontend attributes."""
    values = {}
    if "mhlo.frontend_attributes" in call.attributes:
        for named in ir.DictAttr(call.attributes["mhlo.frontend_attributes"]):
            values[named.name] = _from_text(ir.StringAttr(named.attr).value)
    for place in _TYPED:
        if place in call.attributes and isinstance(call.attributes[place], ir.DictAttr):
            for named in call.attributes[place]:
                values[named.name] = _from_attribute(named.attr)
    return values


def _from_text(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _from_attribute(attribute: ir.Attribute) -> bool | int | float | str:
    if isinstance(attribute, (ir.BoolAttr, ir.IntegerAttr, ir.FloatAttr, ir.StringAttr)):
        return attribute.value
    raise CompileError(f"attribute {attribute} of a tt.* call is neither a number nor a string")


def expand_tt_calls(module: ir.Module, handled: frozenset[str] = frozenset()) -> ir.Module:
    """Replace each `tt.*` call that the emulator knows by what it computes; those `handled` by an FFI handler stay."""
    calls = [call for call in tt_calls(module) if target_of(call) not in handled]
    if not calls:
        return module
    from bridge.emulator.calls import CALLS  # brings JAX along: only programs with such a call pay for it

    for call in calls:
        if target_of(call) in CALLS:
            _expand(module, call)
    return module


def expand_composites(module: ir.Module) -> ir.Module:
    """Replace each composite of calls that the emulated chip computes better whole; to run before composites are opened."""
    composites = list(modules.operations(module, "stablehlo.composite"))
    wanted = [one for one in composites if ir.StringAttr(one.attributes["name"]).value.startswith(COMPOSITE_PREFIX)]
    for composite in wanted:
        values = {named.name: _from_attribute(named.attr) for named in composite.attributes["composite_attributes"]}
        _replace(module, composite, ir.StringAttr(composite.attributes["name"]).value, values)
    return module


def _expand(module: ir.Module, call: ir.OpView) -> None:
    _replace(module, call, target_of(call), attributes_of(call))


def _replace(module: ir.Module, call: ir.OpView, target: str, attributes: dict[str, bool | int | float | str]) -> None:
    """Put what the emulator computes for `target` in the place of a call or composite."""
    text = _lowered(
        target,
        tuple(sorted(attributes.items())),
        tuple(str(operand.type) for operand in call.operands),
        tuple(str(result.type) for result in call.results),
    )
    body = ir.Module.parse(text, module.context)
    # Opened first, so that it brings no functions of its own into the program.
    function = modules.main_function(inline_composites(body))
    with ir.InsertionPoint(call):
        values = inlined_func_call(function.operation, list(call.operands), call.location)
    for old, new in zip(call.results, values, strict=True):
        old.replace_all_uses_with(new)
    call.erase()


@functools.lru_cache(maxsize=512)
def _lowered(target: str, attributes: tuple, operands: tuple[str, ...], results: tuple[str, ...]) -> str:
    """The StableHLO of the emulator's function at these types.

    Raises:
        CompileError: the function does not take these operands or attributes, or
            computes other types than the call promises.
    """
    import jax

    from bridge.emulator.calls import CALLS, COMPOSITES

    signature = f"{target} ({', '.join(operands)}) -> ({', '.join(results)})"
    function = functools.partial((CALLS | COMPOSITES)[target], **dict(attributes))
    try:
        lowered = jax.jit(function).lower(*map(_shape, operands))
    except Exception as error:
        raise CompileError(f"{signature} with {dict(attributes)} is not a call that the chip knows: {error}") from error
    promised = [_shape(text) for text in results]
    computed = jax.tree.leaves(lowered.out_info)
    if [(s.shape, s.dtype) for s in promised] != [(s.shape, s.dtype) for s in computed]:
        found = ", ".join(f"{s.dtype}{list(s.shape)}" for s in computed)
        raise CompileError(f"{signature}: the chip computes {found} from these operands")
    return str(lowered.compiler_ir("stablehlo"))


def _shape(text: str):
    """jax.ShapeDtypeStruct of "tensor<2x3xbf16>"."""
    import jax
    import jax.numpy as jnp

    *sizes, element = text.removeprefix("tensor<").removesuffix(">").split("x")
    dtypes = {
        "f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16, "f64": jnp.float64, "i1": jnp.bool_,
        "i8": jnp.int8, "i16": jnp.int16, "i32": jnp.int32, "i64": jnp.int64,
        "ui8": jnp.uint8, "ui16": jnp.uint16, "ui32": jnp.uint32, "ui64": jnp.uint64,
    }  # fmt: skip
    if element not in dtypes:
        raise CompileError(f"a tt.* call takes no operand of type {text}")
    return jax.ShapeDtypeStruct(tuple(map(int, sizes)), dtypes[element])


def spell_tt_calls(module: ir.Module) -> ir.Module:
    """Move the attributes of some calls to where libtt reads them."""
    for call in tt_calls(module):
        if target_of(call) in _METADATA_CALLS:
            values = {name: ir.StringAttr.get(str(value)) for name, value in attributes_of(call).items()}
            call.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(values)
            for place in _TYPED:
                if place in call.attributes:
                    del call.attributes[place]
    return module
