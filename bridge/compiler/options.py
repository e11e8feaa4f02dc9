"""Options that make XLA's CPU compiler mean what StableHLO says.

XLA's defaults for the CPU are TensorFlow's habits; where they change a result they are switched
off here, for whatever client the program comes from.
"""

# With it, a maximum or minimum inside a reduction drops NaN, which StableHLO's and torch's keep.
_OFF = ("xla_cpu_enable_fast_min_max",)

# Field numbers: CompileOptionsProto.env_option_overrides, its map's key and value, OptionOverrideProto.bool_field.
_OVERRIDES, _KEY, _VALUE, _BOOL = 7, 1, 2, 2


def exact(options: bytes) -> bytes:
    """A serialized CompileOptionsProto with XLA's inexact defaults off; what it sets itself has the last word."""
    return b"".join(map(_switched_off, _OFF)) + options


def _switched_off(name: str) -> bytes:
    false = bytes((_BOOL << 3, 0))
    return _field(_OVERRIDES, _field(_KEY, name.encode()) + _field(_VALUE, false))


def _field(number: int, body: bytes) -> bytes:
    """A length-delimited field; number below 16 and body below 128 bytes take one byte each."""
    return bytes((number << 3 | 2, len(body))) + body
