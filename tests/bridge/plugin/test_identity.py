"""The chip presents itself as a TPU, and says in its version what it really is."""

import ctypes

import pypjrt
import pytest
from pypjrt.topology import Topology

from bridge import __version__
from bridge.backend import STABLEHLO_VERSION


def test_platform(client):
    """Platform "tpu"; the version names this project and the emulated chip."""
    assert client.platform_name == "tpu"
    version = Topology.from_client(client).platform_version
    assert f"tt-tpu-bridge {__version__}" in version and "emulated" in version


def test_device(client, device):
    """Kind, id, process and coordinates are those of the first chip of a one-core TPU."""
    assert (device.kind, device.id, device.process_index) == ("TPU v5 lite", 0, 0)
    assert device.coords == (0, 0, 0)
    assert "coords=(0,0,0)" in device.to_string()


def test_both_functions_give_the_same_attributes(device):
    """DeviceDescription_Attributes and the newer Device_GetAttributes agree."""
    expected = {"coords": (0, 0, 0), "core_on_chip": 0, "slice_index": 0, "num_cores": 1}
    assert device.attributes == device.live_attributes() == expected


def test_stablehlo_version_is_what_jaxlib_reads(plugin):
    """No newer StableHLO is asked for than the compiler's own MLIR can read."""
    from jaxlib.mlir.dialects import stablehlo

    advertised = ".".join(map(str, plugin.attributes["stablehlo_current_version"]))
    assert advertised == STABLEHLO_VERSION == stablehlo.get_current_version()


@pytest.mark.parametrize(("name", "chips", "last"), (("v5e:1x1", 1, (0, 0, 0)), ("v5e:2x2", 4, (1, 1, 0)), ("tt:2x2x2", 8, (1, 1, 1))))  # fmt: skip
def test_a_topology_by_name_has_its_chips(plugin, name, chips, last):
    """A topology made by name lists a hole-free box of chips, with no client."""
    topology = Topology.create(plugin, name)
    devices = topology.device_descriptions()
    assert len(devices) == chips
    assert [d["id"] for d in devices] == list(range(chips))
    assert tuple(devices[-1]["attributes"]["coords"]) == last
    again = Topology.deserialize(plugin, topology.serialize())
    assert len(again.device_descriptions()) == chips
    again.close(), topology.close()


@pytest.mark.parametrize("name", ("v5e:0x2", "v5e:2y2", "h100:8", "v5e:"))
def test_an_unknown_topology_is_refused(plugin, name):
    """A name that describes no box of chips is an error that says what to write."""
    with pytest.raises(pypjrt.errors.PjrtError, match="topology"):
        Topology.create(plugin, name)


def test_chip_count_extension(plugin, client):
    """The TPU topology extension counts the chips of a topology."""
    extension = plugin.extension("TpuTopology")
    table = plugin.abi.PJRT_TpuTopology_Extension.from_address(extension.address)
    call = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(table.chip_count)
    for topology, chips in ((Topology.from_client(client), 1), (Topology.create(plugin, "v5e:2x2"), 4)):
        arguments = plugin.abi.PJRT_TpuTopology_ChipCount_Args(topology=topology._check())
        assert not call(ctypes.addressof(arguments))
        assert arguments.chip_count == chips


def test_output_memory_kinds(client):
    """A program's results lie in device memory."""
    from programs import add

    with client.compile(add(4)) as program:
        assert program.output_memory_kinds() == ["device"]
