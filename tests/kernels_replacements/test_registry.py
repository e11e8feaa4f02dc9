"""A replacement is where its original was, in any import order, once, and only where the parameters are the same."""

import importlib
import inspect
import sys

import pytest

from kernels_replacements import import_hooks, registry
from kernels_replacements.errors import KernelWarning
from kernels_replacements.registry import Replacement, parameters, replaces

ORIGINAL = '''
"""A kernel of a package that a user has."""

def scaled(x: list, *, scale: float = 2.0, interpret: bool = False) -> list:
    return ["original", scale]
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """package(name, text): a module of that name that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_installed", [])
    names = []

    def make(name, text=ORIGINAL):
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        names.append(name)
        return name

    yield make
    for name in names:
        sys.modules.pop(name, None)
        import_hooks._finder.hooks.pop(name, None)
    monkeypatch.setattr(import_hooks._finder, "chosen", [])


def ours(x: list, *, scale: float = 7.0, interpret: bool = False) -> list:
    return ["ours", scale]


@pytest.mark.parametrize("registered_first", [True, False])
def test_an_original_is_replaced_in_any_order(package, registered_first):
    """Also where other modules had already imported it by name."""
    name, user = package("tt_kernel_a"), package("tt_user_a", "from tt_kernel_a import scaled\n")
    if registered_first:
        replaces(name, "scaled")(ours)
    module = importlib.import_module(user)
    if not registered_first:
        assert module.scaled([])[0] == "original"
        replaces(name, "scaled")(ours)
    assert module.scaled([])[0] == "ours"


def test_defaults_and_annotations_stay_the_originals(package):
    """What is left out has the original's default, and torch_tpu reads the original's annotations."""
    name = package("tt_kernel_b")
    replaces(name, "scaled")(ours)
    function = importlib.import_module(name).scaled
    assert function([]) == ["ours", 2.0]
    assert function([], scale=3.0) == ["ours", 3.0]
    assert inspect.signature(function).parameters["scale"].annotation is float
    assert function.__annotations__["return"] is list


def test_a_caller_who_asks_to_interpret_gets_the_original(package):
    """interpret=True means the original kernel, on whatever platform."""
    name = package("tt_kernel_c")
    replaces(name, "scaled")(ours)
    assert importlib.import_module(name).scaled([], interpret=True) == ["original", 2.0]


def test_a_changed_original_is_named_and_left(package):
    """An original with other parameters keeps its own code; the warning names it."""
    name = package("tt_kernel_d", ORIGINAL.replace("scale:", "scales:").replace('", scale]', '", scales]'))
    replaces(name, "scaled")(ours)
    with pytest.warns(KernelWarning, match=r"tt_kernel_d\.scaled\(x, interpret, scales\) has other parameters"):
        module = importlib.import_module(name)
    assert module.scaled([])[0] == "original"


def test_one_of_several_versions_is_chosen_by_its_parameters(package):
    """Where parameters changed between versions, each version has its replacement."""
    name = package("tt_kernel_e")
    replaces(name, "scaled")(lambda x, *, factor: "other version")
    replaces(name, "scaled")(ours)
    replaces(name, "scaled")(lambda x, *, scales: "third version")
    assert importlib.import_module(name).scaled([])[0] == "ours"


def test_a_fork_that_moved_the_file_is_recognised(package):
    """Same name, same parameters, another module of kernels: the same kernel. Other parameters: another one."""
    package("tt_kernel_f")
    pytest.importorskip("jax")
    replaces("tt_kernel_f", "scaled")(ours)
    import_hooks.when_one_imported(registry._may_hold_kernels, registry._replace_moved)
    assert importlib.import_module(package("tt_fork_kernels")).scaled([])[0] == "ours"
    other = package("tt_other_kernels", ORIGINAL.replace("scale:", "size:").replace('", scale]', '", size]'))
    assert importlib.import_module(other).scaled([])[0] == "original"


def test_installing_twice_replaces_once(package):
    """The second registration of the same function changes nothing."""
    name = package("tt_kernel_g")
    replaces(name, "scaled")(ours)
    replaces(name, "scaled")(ours)
    function = importlib.import_module(name).scaled
    assert function.__wrapped__([])[0] == "original"


def test_calls_are_counted(package):
    """Under the name of what was called."""
    name = package("tt_kernel_h")
    replaces(name, "scaled")(ours)
    module = importlib.import_module(name)
    module.scaled([]), module.scaled([])
    assert registry.used["tt_kernel_h.scaled"] == 2


def test_every_known_replacement_fits_what_is_installed():
    """Each original that this environment has takes exactly its replacement's parameters."""
    from kernels_replacements.originals import REPLACEMENTS

    checked = 0
    for known in REPLACEMENTS:
        if known.package != "jax":
            continue
        original = getattr(importlib.import_module(known.module), known.function)
        assert parameters(known.load()) == parameters(original), known.original
        checked += 1
    assert checked >= 9
    assert all(isinstance(known, Replacement) and (known.version or known.package == "sgl-jax") for known in REPLACEMENTS)


def test_a_compat_process_replaces_jaxs_kernels_and_imports_nothing_for_it(in_compat):
    """At start no JAX is imported; a JAX kernel that is then exported for a TPU holds the tt.* call."""
    done = in_compat(
        """
        import sys
        assert "jax" not in sys.modules, "jax was imported at start"
        import jax, jax.numpy as jnp
        from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
        s = jax.ShapeDtypeStruct
        pages = s((2, 16, 64, 64), jnp.bfloat16)
        arguments = s((2, 4, 64), jnp.bfloat16), pages, pages, s((2,), jnp.int32), s((2, 4), jnp.int32)
        run = jax.jit(lambda *x: paged_attention(*x, pages_per_compute_block=2))
        check = jax.export.DisabledSafetyCheck.custom_call("tt.paged_scaled_dot_product_attention_decode")
        text = jax.export.export(run, platforms=["tpu"], disabled_checks=[check])(*arguments).mlir_module()
        assert "tt.paged_scaled_dot_product_attention_decode" in text and "tpu_custom_call" not in text
        """
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "paged_attention_kernel.paged_attention ×1" in done.stderr


def test_without_compat_nothing_is_replaced(in_compat):
    """LIBTT_TPU_COMPAT unset: JAX's kernels and lowering rules are JAX's own."""
    done = in_compat(
        """
        from jax.experimental.pallas.ops.tpu import matmul
        assert not hasattr(matmul.matmul, "__tt_tpu_replaces__")
        from jax._src.pallas import pallas_call
        assert pallas_call._pallas_call_lowering.__module__ == "jax._src.pallas.pallas_call"
        """,
        LIBTT_TPU_COMPAT="0",
    )
    assert done.returncode == 0, done.stderr[-2000:]
