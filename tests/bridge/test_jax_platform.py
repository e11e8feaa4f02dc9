"""The chip as a platform of JAX, each time in a process of its own."""

import os
import subprocess
import sys

import pytest

CHIPS = 4


@pytest.fixture
def run(tmp_path, root):
    """run(source): the last line that `source` prints where JAX sees four emulated chips."""

    def run(source: str, **environment: str) -> str:
        ours = ("LIBTT", "TT_TPU", "TPU", "TORCH", "JAX")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        clean |= {"LIBTT_TPU_COMPAT": "1", "TT_TPU_CACHE_DIR": str(tmp_path), "TT_TPU_EMULATED_CHIPS": str(CHIPS)}
        source = "import jax, jax.numpy as jnp, numpy as np\n" + source
        done = subprocess.run(
            [sys.executable, "-c", source], env=clean | environment, cwd=root, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.strip().splitlines()[-1]

    return run


def test_a_setting_that_cannot_be_used_ends_the_program(tmp_path, root):
    """JAX must not go on with the CPU instead."""
    environment = os.environ | {"LIBTT_TPU_COMPAT": "1", "TT_TPU_EMULATED_CHIPS": "abc", "JAX_PLATFORMS": ""}
    command = [sys.executable, "-c", "import jax; print(jax.devices())"]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0 and "Cpu" not in done.stdout
    assert "TT_TPU_EMULATED_CHIPS" in done.stderr.strip().splitlines()[-1]


MESH = """
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
x = np.arange(64, dtype=np.float32).reshape(8, 8)
"""


def test_the_chips_are_tpus(run):
    """All emulated chips are there, as TPUs, and are JAX's default."""
    assert run("print(jax.default_backend(), {d.platform for d in jax.devices()}, len(jax.devices()))") == (
        f"tpu {{'tpu'}} {CHIPS}"
    )


@pytest.mark.parametrize("environment", [{"LIBTT_TPU_COMPAT": "0"}, {"JAX_PLATFORMS": "cpu"}], ids=str)
def test_without_it_jax_is_as_ever(run, environment):
    """Where no TPU is presented, or JAX is told to use the CPU, nothing changes."""
    assert run("print(jax.default_backend())", **environment) == "cpu"


def test_a_sharded_jit(run):
    """A product of sharded matrices is divided over the chips, and is what one chip computes."""
    source = MESH + """
left, right = (jax.device_put(x, NamedSharding(mesh, spec)) for spec in (P("a", "b"), P("b", None)))
product = jax.jit(lambda l, r: l @ r, out_shardings=NamedSharding(mesh, P("a", None)))(left, right)
print(np.array_equal(product, x @ x), len(product.sharding.device_set), product.addressable_shards[0].data.shape)
"""
    assert run(source) == "True 4 (4, 8)"


def test_collectives_under_shard_map(run):
    """psum, all_gather, ppermute and psum_scatter between the chips of one process."""
    source = MESH + """
def step(x):
    total = jax.lax.psum(x, "a")
    whole = jax.lax.all_gather(x, "b", axis=1, tiled=True)
    shifted = jax.lax.ppermute(x, "a", [(0, 1), (1, 0)])
    part = jax.lax.psum_scatter(x, "b", scatter_dimension=0, tiled=True)
    return total, whole, shifted, part
specs = (P(None, "b"), P("a", None), P("a", "b"), P(("a", "b"), None))
total, whole, shifted, part = jax.jit(jax.shard_map(
    step, mesh=mesh, in_specs=P("a", "b"), out_specs=specs, check_vma=False))(x)
ok = [np.array_equal(total, x[:4] + x[4:]), np.array_equal(whole, x), np.array_equal(shifted, np.roll(x, 4, 0)),
      np.array_equal(part, x[:, :4] + x[:, 4:])]
print(ok)
"""
    assert run(source) == "[True, True, True, True]"


def test_a_donated_argument_is_taken_over(run):
    """A donated array is gone, and its memory is the result's."""
    source = """
x = jnp.ones((1 << 20,))
before = jax.devices()[0].memory_stats()["bytes_in_use"]
y = jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(x))
after = jax.devices()[0].memory_stats()["bytes_in_use"]
print(x.is_deleted(), float(y[0]), after == before)
"""
    assert run(source) == "True 2.0 True"


def test_a_replaced_kernel_runs_on_a_chip(run):
    """JAX's own Pallas matmul, which only a TPU runs, computes its product."""
    source = """
from jax.experimental.pallas.ops.tpu import matmul
x = jax.random.normal(jax.random.key(0), (256, 256))
print(bool(jnp.allclose(matmul.matmul(x, x, block_shape=(128, 128)), x @ x, atol=1e-3)))
"""
    assert run(source) == "True"
