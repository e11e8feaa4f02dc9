"""The inner plugin as a worker sees it: compile a program, hand back the serialized executable.

Speaks the PJRT C API through ctypes with pypjrt's structures; only the handful of
functions that a compile needs.
"""

import ctypes
from pathlib import Path

from pypjrt import _abi

_VOIDP = ctypes.c_void_p
_DEVICE_COUNT, _INT64 = b"cpu_device_count", 1  # an option of XLA's CPU plugin; PJRT_NamedValue_kInt64
_CALL = ctypes.CFUNCTYPE(_VOIDP, _VOIDP)


class InnerError(Exception):
    """The inner plugin answered with a PJRT error: its code and message."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


class InnerPlugin:
    """A loaded PJRT plugin with a client for each number of devices, which lives as long as the process.

    Args:
        library: shared library that exports `GetInnerPjrtApi` (ours: the inner API
            with our FFI handlers registered) or plain `GetPjrtApi`.
    """

    def __init__(self, library: Path):
        # The handle is kept: dlclose would take the FFI registry away.
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_LOCAL)
        entry = getattr(self._library, "GetInnerPjrtApi", None) or self._library.GetPjrtApi
        entry.restype, entry.argtypes = _VOIDP, []
        self._api = entry()
        if not self._api:
            raise InnerError(13, f"{library} has no PJRT API: see the log above for the library it wraps")
        _, major, minor = _abi.bootstrap_offsets()
        version = [ctypes.c_int32.from_address(self._api + offset).value for offset in (major, minor)]
        self._abi, _ = _abi.load(*version)
        self._call("PJRT_Plugin_Initialize")
        self._clients = {1: self._call("PJRT_Client_Create").client}

    def compile(self, program: bytes, form: str, options: bytes, devices: int = 1) -> bytes:
        """Compile and serialize.

        Args:
            program: StableHLO portable artifact, MLIR bytecode or text.
            form: PJRT's program format, "mlir".
            options: a serialized CompileOptionsProto.
            devices: how many devices of one client run the program.

        Returns:
            The serialized executable of the inner plugin.

        Raises:
            InnerError: with the inner plugin's own code and message.
        """
        code, name, opts = (ctypes.create_string_buffer(b, len(b)) for b in (program, form.encode(), options))
        described = self._structure("PJRT_Program", code=_address(code), code_size=len(code),
                                    format=_address(name), format_size=len(name))  # fmt: skip
        loaded = self._call("PJRT_Client_Compile", client=self._client(devices), program=ctypes.addressof(described),
                            compile_options=_address(opts), compile_options_size=len(opts)).executable  # fmt: skip
        executable = self._call("PJRT_LoadedExecutable_GetExecutable", loaded_executable=loaded).executable
        try:
            return self._serialize(executable)
        finally:
            self._call("PJRT_Executable_Destroy", executable=executable)
            self._call("PJRT_LoadedExecutable_Destroy", executable=loaded)

    def _client(self, devices: int) -> int:
        if devices not in self._clients:
            name = ctypes.create_string_buffer(_DEVICE_COUNT, len(_DEVICE_COUNT))
            count = self._structure("PJRT_NamedValue", name=_address(name), name_size=len(name),
                                    type=_INT64, int64_value=devices, value_size=1)  # fmt: skip
            created = self._call("PJRT_Client_Create", create_options=ctypes.addressof(count), num_options=1)
            self._clients[devices] = created.client
        return self._clients[devices]

    def _serialize(self, executable: int) -> bytes:
        answer = self._call("PJRT_Executable_Serialize", executable=executable)
        try:
            return ctypes.string_at(answer.serialized_bytes, answer.serialized_bytes_size)
        finally:
            ctypes.CFUNCTYPE(None, _VOIDP)(answer.serialized_executable_deleter)(answer.serialized_executable)

    def _structure(self, name: str, /, **fields) -> ctypes.Structure:
        return getattr(self._abi, name)(getattr(self._abi, f"{name}_STRUCT_SIZE"), **fields)

    def _function(self, name: str):
        slot = self._api + self._abi.VTABLE_OFFSET + 8 * self._abi.SLOT[name]
        return _CALL(_VOIDP.from_address(slot).value)

    def _call(self, name: str, /, **fields) -> ctypes.Structure:
        """Call a PJRT function and return its argument structure, which holds the answer."""
        arguments = self._structure(f"{name}_Args", **fields)
        failure = self._function(name)(ctypes.addressof(arguments))
        if failure:
            raise self._failure(failure)
        return arguments

    def _failure(self, error: int) -> InnerError:
        message = self._structure("PJRT_Error_Message_Args", error=error)
        self._function("PJRT_Error_Message")(ctypes.addressof(message))
        code = self._structure("PJRT_Error_GetCode_Args", error=error)
        self._function("PJRT_Error_GetCode")(ctypes.addressof(code))
        text = ctypes.string_at(message.message, message.message_size).decode(errors="replace")
        destroy = self._structure("PJRT_Error_Destroy_Args", error=error)
        self._function("PJRT_Error_Destroy")(ctypes.addressof(destroy))
        return InnerError(int(code.code), text)


def _address(buffer: ctypes.Array) -> int:
    return ctypes.addressof(buffer)
