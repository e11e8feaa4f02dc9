"""What lets `import sglang` succeed without triton and torchvision.

SGLang imports both at module level, in every process that it spawns, for code
that never runs on this platform. Stand-ins take their place: a triton whose
kernels refuse to launch, and a torchvision that is there only while one of the
two modules that want it is loaded.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

from bridge.errors import BridgeError

# torch asks for this version's features; no kernel is ever compiled by it.
TRITON_VERSION = "3.0.0"
_NEED_TORCHVISION = ("sglang.srt.configs.deepseek_ocr", "sglang.srt.multimodal.internvl_utils")


class StubKernel:
    """A Triton kernel that is defined but cannot be launched."""

    def __init__(self, function: Callable):
        functools.update_wrapper(self, function)

    def __getitem__(self, grid: Any) -> "StubKernel":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise BridgeError(
            f"the Triton kernel {self.__module__}.{self.__qualname__} was launched, and there is no Triton for "
            "this chip: the feature that calls it is not supported by the platform tpu_oot"
        )


def _jit(function: Callable | None = None, **_options: Any) -> Any:
    return StubKernel(function) if function is not None else StubKernel


def _decorate_nothing(*_args: Any, **_options: Any) -> Callable:
    return lambda kernel: kernel


class _StubValue:
    """Any attribute of a stub module: a value, a type to inherit from or a decorator."""

    def __init__(self, *_args: Any, **_kwargs: Any):
        pass

    def __init_subclass__(cls, **_kwargs: Any):
        super().__init_subclass__()

    def __class_getitem__(cls, _item: Any) -> type:
        return cls


class _StubModule(types.ModuleType):
    """A module in which every public name exists: types where capitalised, else submodules."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            value: Any = type(name, (_StubValue,), {"__module__": self.__name__})
        else:
            value = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **_kwargs: Any) -> Any:
        # `@triton.language.extra.something`, bare or with arguments.
        return args[0] if len(args) == 1 and callable(args[0]) else _decorate_nothing()


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `package` and everything below it, with `names` in the package itself."""

    def __init__(self, package: str, names: dict[str, Any]):
        self.package = package
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != self.package:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        for name, value in self.names.get(module.__name__, {}).items():
            setattr(module, name, value)


def _triton_finder() -> _StubFinder:
    names = {
        "__version__": TRITON_VERSION,
        "jit": _jit,
        "autotune": _decorate_nothing,
        "heuristics": _decorate_nothing,
        "cdiv": lambda a, b: -(-a // b),
        "next_power_of_2": lambda n: 1 << max(0, n - 1).bit_length(),
    }
    return _StubFinder("triton", {"triton": names, "triton.language": {"constexpr": _StubValue}})


class _LentTorchvision(importlib.abc.MetaPathFinder):
    """Lends a module of `_NEED_TORCHVISION` a torchvision while it is being loaded.

    Left in place, the stand-in would tell transformers that torchvision is there.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _NEED_TORCHVISION:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec and spec.loader:
            spec.loader.exec_module = functools.partial(self._load, spec.loader.exec_module)
        return spec

    @staticmethod
    def _load(exec_module: Callable, module: types.ModuleType) -> None:
        finder = _StubFinder("torchvision", {})
        sys.meta_path.append(finder)
        try:
            exec_module(module)
        finally:
            sys.meta_path.remove(finder)
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]


def prepare_imports() -> None:
    """Make `import sglang` work in this process; called as soon as sglang.srt.environ is imported.

    A triton or torchvision that is installed is left alone.
    """
    if importlib.util.find_spec("triton") is None:
        # torch decides once whether there is a triton: let it find out the truth.
        from torch.utils._triton import has_triton_package

        has_triton_package()
        sys.meta_path.append(_triton_finder())
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.insert(0, _LentTorchvision())
