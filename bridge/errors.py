"""The errors of this project.

Each message says what was wrong, where, and what to do; a command line prints
the message alone, never a traceback.
"""


class BridgeError(Exception):
    """Base of every error that this project raises on purpose."""


class SettingsError(BridgeError):
    """An environment variable has a value that cannot be used."""


class BackendError(BridgeError):
    """The wanted backend, its inner plugin or its chips are not there."""


class CompileError(BridgeError):
    """A program cannot be compiled for the chip: names the operation, its shapes and what to do."""


class CheckpointError(BridgeError):
    """A model folder cannot be served."""


class LaunchError(BridgeError):
    """A process did not start, or did not become ready."""


class MeshError(BridgeError):
    """Processes cannot be joined into a mesh: names the number of chips, the descriptor or the variable."""
