"""Runs a function right after a named module has been imported, whoever imports it and when.

One finder on sys.meta_path serves all callers. It imports nothing itself, so
that a hook on torch costs nothing to a program that never imports torch.
"""

import importlib.machinery
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Hook = Callable[[ModuleType], None]


class _HookedLoader(Loader):
    """The module's own loader, with the hooks after it."""

    def __init__(self, loader: Loader, hooks: list[Hook]):
        self._loader, self._hooks = loader, hooks

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader: inspect, pickle and resources ask it.
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for hook in self._hooks:
            hook(module)


class _Provided(Loader):
    """A module that is made, not found."""

    def __init__(self, fill: Hook):
        self._fill = fill

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self._fill(module)


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self.hooks: dict[str, list[Hook]] = {}
        self.provided: dict[str, Hook] = {}
        self.instead: set[str] = set()
        self.chosen: list[tuple[Callable[[str], bool], Hook]] = []

    def find_spec(self, name, path=None, target=None) -> ModuleSpec | None:
        hooks = [*self.hooks.get(name, ()), *(hook for chooses, hook in self.chosen if chooses(name))]
        if not hooks and name not in self.provided:
            return None
        spec = None if name in self.instead else self._elsewhere(name, path, target)
        if spec is None and name in self.provided:
            spec = importlib.machinery.ModuleSpec(name, _Provided(self.provided[name]), is_package=False)
        if spec is not None and spec.loader is not None and hooks:
            spec.loader = _HookedLoader(spec.loader, hooks)
        return spec

    def _elsewhere(self, name, path, target) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


_finder = _Finder()


def _install() -> None:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def when_imported(name: str, hook: Hook) -> None:
    """Call `hook(module)` once module `name` has run, or now where it already has."""
    if name in sys.modules:
        hook(sys.modules[name])
        return
    _finder.hooks.setdefault(name, []).append(hook)
    _install()


def when_one_imported(chooses: Callable[[str], bool], hook: Hook) -> None:
    """Call `hook(module)` once a module whose name `chooses` has run, and now for those that already have."""
    _finder.chosen.append((chooses, hook))
    _install()
    for name, module in list(sys.modules.items()):
        if chooses(name) and isinstance(module, ModuleType):
            hook(module)


def provide(name: str, fill: Hook, instead: bool = False) -> None:
    """Let `import name` succeed where nothing is installed under it: `fill(module)` fills an empty module.

    With `instead`, also where something is installed, of which then nothing runs.
    """
    _finder.provided[name] = fill
    if instead:
        _finder.instead.add(name)
    _install()
