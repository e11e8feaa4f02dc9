"""Programs: compiled by the service, filtered options, stamped when serialized."""

import ctypes

import pypjrt
import pytest
from programs import add, floats, read
from pypjrt.compile_options import _bytes_field


class WithOverrides(pypjrt.CompileOptions):
    """Compile options with string entries in env_option_overrides, as torch_tpu sends them."""

    def __init__(self, **overrides: str):
        super().__init__()
        self.overrides = overrides

    def encode(self, abi) -> bytes:
        encoded = super().encode(abi)
        for key, value in self.overrides.items():
            entry = _bytes_field(1, key.encode()) + _bytes_field(2, _bytes_field(1, value.encode()))
            encoded += _bytes_field(7, entry)
        return encoded


@pytest.mark.parametrize(
    "overrides",
    ({"xla_tpu_autofdo": "true"}, {"enable_trace": "true"}, {"experimental_weight_dtype": "bfp_bf8", "xla_jf_x": "1"}),
)
def test_options_for_other_chips_are_accepted(client, device, overrides):
    """A TPU's options and libtt's compile, and mean nothing on the emulated chip."""
    with client.compile(add(4), options=WithOverrides(**overrides)) as program:
        (result,) = program(floats(client, device, [1, 2, 3, 4]), floats(client, device, [1, 1, 1, 1]))
        assert read(result) == [2, 3, 4, 5]


def test_an_option_of_the_inner_plugin_reaches_it(client):
    """An XLA CPU option is not dropped: a bad value for it is refused."""
    with pytest.raises(pypjrt.errors.PjrtError):
        client.compile(add(4), options=WithOverrides(xla_backend_optimization_level="not a number"))


def test_a_serialized_program_runs_again(client, device):
    """Serialize and deserialize keep a program, and which of its arguments it overwrites."""
    from programs import increment_in_place

    with client.compile(increment_in_place(1024)) as program:
        blob = program.serialize()
    with client.deserialize_executable(blob) as again:
        before = device.memory_stats()["bytes_in_use"]
        argument = floats(client, device, [1.0] * 1024)
        (result,) = again(argument)
        assert read(result)[0] == 2.0
        assert device.memory_stats()["bytes_in_use"] == before + 4096
        result.close()


@pytest.mark.parametrize("damage", ("empty", "inner", "fingerprint", "cut"))
def test_a_foreign_executable_is_refused(client, damage):
    """An executable without our stamp, or with another build's, is an error and no crash."""
    with client.compile(add(4)) as program:
        blob = program.serialize()
    damaged = {
        "empty": b"\0",
        "inner": blob[4 + 4 + 16 + 4 :],
        "fingerprint": blob[:8] + bytes([blob[8] ^ 1]) + blob[9:],
        "cut": blob[:10],
    }[damage]
    with pytest.raises(pypjrt.errors.PjrtError, match="another plugin, version or processor"):
        client.deserialize_executable(damaged)


def test_compiled_programs_are_counted(plugin, client):
    """The counter that a server's steady state is judged by counts compilations and nothing else."""
    count = ctypes.CDLL(str(plugin.path)).TtTpuCompiledProgramCount
    count.restype = ctypes.c_ulong
    before = count()
    with client.compile(add(5)) as program:
        blob = program.serialize()
    client.deserialize_executable(blob).close()
    assert count() == before + 1


def test_a_broken_program_is_an_error(client):
    """What is no StableHLO is refused with a message, and the next program compiles."""
    with pytest.raises(pypjrt.errors.PjrtError, match="StableHLO"):
        client.compile("this is not a program")
    client.compile(add(3)).close()


@pytest.mark.parametrize("elements", [1000, 300_000])
def test_packed_types_come_whole(client, device, elements):
    """On the host a u4 has a byte of its own, on the chip half of one; small arrays and large ones come as they were sent."""
    unpack = f"""module @unpack {{ func.func public @main(%packed: tensor<{elements}xui4>) -> tensor<{elements}xui8> {{
        %wide = stablehlo.convert %packed : (tensor<{elements}xui4>) -> tensor<{elements}xui8>
        return %wide : tensor<{elements}xui8> }} }}"""
    values = bytearray(1 + i % 7 for i in range(elements))
    with client.compile(unpack) as program, client.buffer_from_host(values, 22, [elements], device) as packed:
        (wide,) = program(packed)
        assert bytes(wide.to_host()) == bytes(values)
        wide.close()
