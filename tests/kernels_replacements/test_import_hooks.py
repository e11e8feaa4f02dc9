"""A hook runs once its module has run, in whatever order things happen."""

import importlib
import sys

import pytest

from kernels_replacements import import_hooks


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that can be imported, with x = 1 in it."""
    name = f"hooked_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_a_hook_runs_after_the_module(module):
    """The hook sees what the module has defined, and what it changes stays."""
    import_hooks.when_imported(module, lambda m: setattr(m, "x", m.x + 1))
    assert importlib.import_module(module).x == 2


def test_a_late_hook_runs_at_once(module):
    """A module that was imported already is handed over right away."""
    importlib.import_module(module)
    seen = []
    import_hooks.when_imported(module, seen.append)
    assert seen == [sys.modules[module]]


def test_hooks_run_in_order(module):
    """Several hooks on one module run in the order in which they were left."""
    seen = []
    for number in range(3):
        import_hooks.when_imported(module, lambda m, number=number: seen.append(number))
    importlib.import_module(module)
    assert seen == [0, 1, 2]


def test_the_module_keeps_its_loader(module):
    """inspect and resources find the source as without a hook."""
    import inspect

    import_hooks.when_imported(module, lambda m: None)
    assert inspect.getsource(importlib.import_module(module)) == "x = 1\n"


def test_an_error_in_a_hook_reaches_the_importer(module):
    """A hook that fails fails the import; nothing half-made stays behind."""

    def fail(_module):
        raise RuntimeError("no")

    import_hooks.when_imported(module, fail)
    with pytest.raises(RuntimeError, match="no"):
        importlib.import_module(module)
    assert module not in sys.modules


def test_provide_stands_in_only_for_what_is_missing(module):
    """A provided module is made where none is installed; an installed one is left alone."""
    import_hooks.provide(module, lambda m: setattr(m, "x", "provided"))
    import_hooks.provide(module + "_absent", lambda m: setattr(m, "x", "provided"))
    assert importlib.import_module(module).x == 1
    assert importlib.import_module(module + "_absent").x == "provided"
    del sys.modules[module + "_absent"]


def test_provide_instead_runs_nothing_of_the_module(module):
    """With `instead`, a provided module takes the place of an installed one, which does not run."""
    import_hooks.provide(module, lambda m: setattr(m, "y", "provided"), instead=True)
    made = importlib.import_module(module)
    assert made.y == "provided" and not hasattr(made, "x")
