"""A Pallas kernel without a replacement is interpreted where it is meant for the chip, and named."""


import numpy as np
import pytest

KERNEL = """
import warnings
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

def halve_kernel(x, out):
    out[...] = x[...] * 0.5

def halve(x):
    spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(halve_kernel, out_shape=shape, grid=(2,), in_specs=[spec], out_specs=spec)(x)

def export(function, *arrays):
    return jax.export.export(jax.jit(function), platforms=["tpu"])(*arrays).mlir_module()

x = jnp.ones((16, 128))
"""


@pytest.fixture
def failure(in_compat):
    """failure(code, **environment): what a process says that ends with an error."""

    def run(code: str, **environment: str) -> str:
        done = in_compat(KERNEL + code, **environment)
        assert done.returncode != 0
        return done.stderr

    return run


def test_an_exported_kernel_is_plain_stablehlo_and_named_once(in_compat):
    """No Mosaic call is left; one warning names kernel and module, however often it is used."""
    done = in_compat(
        KERNEL
        + """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    text = export(lambda x: halve(halve(x)), x)
    export(halve, x[:, :128])
assert "custom_call" not in text
messages = [str(w.message) for w in caught if "interpreted" in str(w.message)]
assert len(messages) == 1 and "Pallas kernel halve_kernel of module" in messages[0], messages
"""
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "halve_kernel of module" in done.stderr and "(interpreted) ×" in done.stderr


def test_an_interpreted_kernel_computes_its_numbers(in_compat, on_chip):
    """A kernel with a grid, a scratch and copies of its own gives what its formula says."""
    done = in_compat(
        KERNEL
        + """
def running_sum(x, out, total, semaphore):
    @pl.when(pl.program_id(0) == 0)
    def _():
        total[...] = jnp.zeros_like(total)
    total[...] += x[...]
    pltpu.async_copy(total, out.at[pl.ds(pl.program_id(0) * 8, 8)], semaphore).wait()

def summed(x):
    spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pl.pallas_call(
        running_sum, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(2,), in_specs=[spec],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
    )(x)
print(export(summed, x))
"""
    )
    assert done.returncode == 0, done.stderr[-2000:]
    import chip

    x = np.random.default_rng(0).standard_normal((16, 128)).astype(np.float32)
    (out,) = chip.run(done.stdout, x)
    np.testing.assert_allclose(out, np.concatenate([x[:8], x[:8] + x[8:]]), rtol=1e-6)


def test_other_platforms_are_left_alone(failure):
    """On the CPU a compat process gets JAX's own error, and JAX's own interpreter where it asks for it."""
    message = failure("jax.jit(halve)(x)")
    assert "Only interpret mode is supported on CPU backend" in message


def test_error_mode_forbids_interpreting(failure):
    """TT_TPU_PALLAS=error names the kernel, the setting and what to do."""
    message = failure("export(halve, x)", TT_TPU_PALLAS="error")
    assert "halve_kernel" in message and "TT_TPU_PALLAS=error" in message and "replaces" in message


@pytest.mark.parametrize(
    ("construct", "body"),
    [
        ("prng_seed", "pltpu.prng_seed(0); out[...] = x[...]"),
        ("get_barrier_semaphore", "pl.semaphore_wait(pltpu.get_barrier_semaphore(), 0); out[...] = x[...]"),
    ],
)
def test_what_only_a_tpu_has_is_named(failure, construct, body):
    """The error names the kernel and the construct."""
    code = f"""
def odd_kernel(x, out):
    {body}
shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
export(lambda x: pl.pallas_call(odd_kernel, out_shape=shape, compiler_params=pltpu.CompilerParams(collective_id=0))(x), x)
"""
    message = failure(code)
    assert "odd_kernel" in message and construct in message


def test_what_jax_fails_on_is_named(failure):
    """JAX's own ragged paged attention kernel, unreplaced, cannot be interpreted: the error says so and where."""
    code = """
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel
s = jax.ShapeDtypeStruct
run = kernel.ragged_paged_attention.__wrapped__
export(lambda *a: run(*a, num_kv_pages_per_block=1, num_queries_per_block=8), s((16, 8, 128), jnp.float32),
       s((8, 32, 4, 128), jnp.float32), s((2,), jnp.int32), s((2, 4), jnp.int32), s((3,), jnp.int32), s((1,), jnp.int32))
"""
    message = failure(code)
    assert "ragged_paged_attention_kernel" in message and "cannot be interpreted" in message
