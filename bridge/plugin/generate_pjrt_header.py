"""Prints a C++ header of the PJRT C API, made from pypjrt's tables.

Nothing of the API is vendored: pypjrt (a build requirement) keeps the layouts
of every structure and the slot of every function at PJRT 0.114, as ctypes.
Pointers come out as `void*`, since ctypes does not know what they point to.

    python generate_pjrt_header.py > pjrt_c_api.h
"""

import ctypes
import inspect
import sys

from pypjrt._abi import pjrt_0_114 as abi

# Sized names keep the widths that the tables hold; c_long and c_int64 are one type on Linux.
SCALARS = {
    ctypes.c_void_p: "void*",
    ctypes.c_char_p: "const char*",
    ctypes.c_bool: "bool",
    ctypes.c_float: "float",
    ctypes.c_double: "double",
    ctypes.c_ulong: "size_t",
    ctypes.c_long: "int64_t",
    ctypes.c_int32: "int32_t",
    ctypes.c_uint32: "uint32_t",
    ctypes.c_int16: "int16_t",
    ctypes.c_uint16: "uint16_t",
    ctypes.c_int8: "int8_t",
    ctypes.c_uint8: "uint8_t",
}


def declare(name: str, ctype: type) -> str:
    """The C declaration of one field."""
    if ctype in SCALARS:
        return f"{SCALARS[ctype]} {name};"
    if issubclass(ctype, ctypes.Array):
        return declare(f"{name}[{ctype._length_}]", ctype._type_)
    if issubclass(ctype, (ctypes.Structure, ctypes.Union)):
        return f"{ctype.__name__} {name};"
    raise TypeError(f"no C type for field {name} of type {ctype!r}")


def fields(cls: type) -> list[str]:
    """The declarations of the fields of `cls`; anonymous members are written in place."""
    anonymous = getattr(cls, "_anonymous_", ())
    lines = []
    for name, ctype, *_ in getattr(cls, "_fields_", ()):
        if name in anonymous:
            lines.append(f"{keyword(ctype)} {{ {' '.join(fields(ctype))} }};")
        else:
            lines.append(declare(name, ctype))
    return lines


def keyword(cls: type) -> str:
    return "union" if issubclass(cls, ctypes.Union) else "struct"


def layouts() -> list[type]:
    """Every structure and union of the tables, in an order in which each is declared before use."""
    classes = [c for c in vars(abi).values() if inspect.isclass(c) and issubclass(c, (ctypes.Structure, ctypes.Union))]
    ordered: list[type] = []

    def visit(cls: type) -> None:
        if cls in ordered:
            return
        for _, ctype, *_ in getattr(cls, "_fields_", ()):
            while issubclass(ctype, ctypes.Array):
                ctype = ctype._type_
            if issubclass(ctype, (ctypes.Structure, ctypes.Union)):
                visit(ctype)
        ordered.append(cls)

    for cls in classes:
        visit(cls)
    return ordered


def header() -> str:
    lines = [
        "// Made by generate_pjrt_header.py from pypjrt's tables; do not edit.",
        "#pragma once",
        "#include <cstddef>",
        "#include <cstdint>",
        "",
    ]
    for cls in layouts():
        if cls.__name__.startswith("XLA_FFI"):
            continue  # jaxlib's own headers declare these
        lines.append(f"{keyword(cls)} {cls.__name__} {{ {' '.join(fields(cls))} }};")
        if ctypes.sizeof(cls):
            lines.append(f"static_assert(sizeof({cls.__name__}) == {ctypes.sizeof(cls)});")
    lines.append("")
    for name, value in vars(abi).items():
        if isinstance(value, int) and name.startswith("PJRT_"):
            lines.append(f"constexpr int {name} = {value};")
    lines.append("")
    lines.append("// The place of each function in PJRT_Api's table.")
    lines.append("enum class Slot : int {")
    lines.extend(f"  {name.removeprefix('PJRT_')} = {index}," for name, index in abi.SLOT.items())
    lines.append(f"  kCount = {len(abi.SLOT)},")
    lines.append("};")
    lines.append(f"constexpr size_t kTableOffset = {abi.VTABLE_OFFSET};")
    lines.append("constexpr const char* kSlotNames[] = {")
    lines.extend(f'  "{name}",' for name in abi.SLOT)
    lines.append("};")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(header() + "\n")
