"""The schema of tt-metal's mesh graph descriptors, as far as a single mesh needs it, and its text form.

Protobuf's own parser reads and writes the text; the messages are declared here, since tt-metal's .proto file
is not among the installed packages. Text names fields, so the numbers below mean nothing outside.
"""

import functools

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import Message

from mesh_descriptors.errors import MeshError

_PACKAGE = "mesh_descriptors"
_FIELD = descriptor_pb2.FieldDescriptorProto
# Message: its fields, "name: type", repeated ones with "*". Enums are in capitals.
_MESSAGES = {
    "TorusTopology": ("dims: int32*", "dim_types: DimType*"),
    "MeshTopology": ("dims: int32*",),
    "Channels": ("count: uint32", "policy: Policy"),
    "MeshDescriptor": (
        "name: string", "arch: Arch", "device_topology: TorusTopology", "host_topology: MeshTopology",
        "channels: Channels",
    ),
    "MeshRef": ("mesh_descriptor: string", "mesh_id: uint32", "device_id: uint32"),
    "GraphRef": ("graph_descriptor: string", "graph_id: uint32"),
    "NodeRef": ("mesh: MeshRef", "graph: GraphRef"),
    "GraphDescriptor": ("name: string", "type: string", "instances: NodeRef*", "channels: Channels"),
    "FabricNodeId": ("mesh_id: uint32", "chip_id: uint32"),
    "PhysicalAsicPosition": ("tray_id: uint32", "asic_location: uint32"),
    "AsicPinning": ("fabric_node_id: FabricNodeId", "physical_asic_position: PhysicalAsicPosition"),
    "MeshGraphDescriptor": (
        "mesh_descriptors: MeshDescriptor*", "graph_descriptors: GraphDescriptor*", "top_level_instance: NodeRef",
        "pinnings: AsicPinning*",
    ),
}  # fmt: skip
_ENUMS = {
    "Arch": ("INVALID_ARCH", "WORMHOLE_B0", "BLACKHOLE"),
    "Policy": ("STRICT", "RELAXED"),
    "DimType": ("INVALID_TYPE", "LINE", "RING"),
}
_SCALARS = {"int32": _FIELD.TYPE_INT32, "uint32": _FIELD.TYPE_UINT32, "string": _FIELD.TYPE_STRING}


def parse(text: str, name: str) -> Message:
    """A MeshGraphDescriptor from its text form; `name` is what an error calls it.

    Raises:
        MeshError: the text has an unknown field, or is no text form at all.
    """
    try:
        return text_format.Parse(text, _message_class()())
    except text_format.ParseError as error:
        raise MeshError(f"{name} is not a mesh graph descriptor: {error}") from None


@functools.cache
def _message_class() -> type[Message]:
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field in enumerate(fields, start=1):
            _add_field(message, number, field)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.MeshGraphDescriptor"))


def _add_field(message: descriptor_pb2.DescriptorProto, number: int, text: str) -> None:
    name, _, kind = text.partition(": ")
    repeated, kind = kind.endswith("*"), kind.rstrip("*")
    field = message.field.add(
        name=name, number=number, label=_FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
    )
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _FIELD.TYPE_ENUM if kind in _ENUMS else _FIELD.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind}"
