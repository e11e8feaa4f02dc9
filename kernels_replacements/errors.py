"""What goes wrong with kernels: arguments that none can take, and a kernel that stands in less well than it could."""


class KernelError(ValueError):
    """A kernel would fail or compute a wrong number: names the kernel, the argument and what fits."""


class KernelWarning(UserWarning):
    """A kernel works, but not as it was meant to: names it, its module and the reason."""


class NotReplaced(Exception):
    """A replacement does not know an option of its original: the original is interpreted for this call."""
