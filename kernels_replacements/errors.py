"""The one error of this package: arguments that a kernel of the chip cannot take."""


class KernelError(ValueError):
    """A kernel would fail or compute a wrong number: names the kernel, the argument and what fits."""
