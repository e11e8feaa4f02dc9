"""Every `tt.*` call that our code emits, alone and in what replacements compose, compiles on the real libtt."""

import functools
import os

import numpy as np
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from compositions import PROGRAMS as COMPOSITIONS  # noqa: E402

from bridge.compiler import module as modules  # noqa: E402
from bridge.compiler import pipeline  # noqa: E402
from bridge.compiler.tt_calls import LIBTT_CALLS  # noqa: E402
from kernels_replacements import tt_calls as tt  # noqa: E402

B, H, K, D, P, N, W = 4, 8, 2, 64, 64, 32, 8
BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32


def s(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


CACHE, TABLE, ROWS = s(N, K, P, D), s(B, W, dtype=I32), s(B, dtype=I32)
ONE, ONE_TABLE = s(1, dtype=I32), s(1, W, dtype=I32)


def decode_with_sink(q, k, v, table, positions, sink):
    return tt.paged_attention_decode(q, k, v, table, positions, sink=sink, sliding_window=128)


def decode_with_mask(q, k, v, table, mask):
    return tt.paged_attention_decode(q, k, v, table, mask=mask, is_causal=False)


def moved(weight, x):
    return x @ tt.weight_dtype_override(tt.mark_argument(weight, kind="parameter", name="w"), "bfp_bf8")


PROGRAMS = {
    "decode": (tt.paged_attention_decode, s(1, B, H, D), CACHE, CACHE, TABLE, ROWS),
    "decode, float32": (tt.paged_attention_decode, *(s(*x, dtype=F32) for x in ((1, B, H, D), (N, K, P, D), (N, K, P, D))), TABLE, ROWS),  # fmt: skip
    "decode, sink and window": (decode_with_sink, s(1, B, H, D), CACHE, CACHE, TABLE, ROWS, s(H, 32)),
    "decode, mask": (decode_with_mask, s(1, B, H, D), CACHE, CACHE, TABLE, s(B, 1, H, W * P)),
    "chunk": (tt.chunked_attention, s(1, H, 64, D), CACHE, CACHE, ONE_TABLE, ONE),
    "dense": (tt.attention, s(2, H, 64, D), s(2, K, 64, D), s(2, K, 64, D)),
    "update": (tt.paged_update_cache, CACHE, s(1, B, K, D), ROWS, TABLE),
    "fill": (tt.paged_fill_cache, CACHE, s(1, K, 64, D), ONE_TABLE),
    "fill, one of several": (tt.paged_fill_cache, CACHE, s(1, K, 64, D), TABLE, ONE),
    "mla decode": (functools.partial(tt.mla_decode, head_dim_v=512), s(1, B, 16, 576), s(N, 1, P, 576), TABLE, ROWS),
    "mla prefill": (functools.partial(tt.mla_prefill, head_dim_v=512), s(1, 16, 64, 576), s(1, 1, 64, 576)),
    "gated delta rule": (tt.gated_delta_rule, *(s(1, 64, 4, 128) for _ in range(3)), *(s(1, 64, 4, dtype=F32) for _ in range(2)), s(1, 4, 128, 128, dtype=F32)),  # fmt: skip
    "gated delta decode": (tt.gated_delta_decode, s(8, 4, 128, 128, dtype=F32), s(2, 8 * 128), s(2, 4), s(2, 4), s(4, dtype=F32), s(4, dtype=F32), s(2, dtype=I32), s(2, dtype=I32)),  # fmt: skip
    "convolution": (tt.causal_conv1d_update, s(8, 256, 3), s(2, 256), s(256, 4), s(2, dtype=I32), s(2, dtype=I32)),
    "state pool": (tt.state_pool_update, s(8, 4, 128, 128, dtype=F32), s(2, dtype=I32), s(2, 4, 128, 128, dtype=F32)),
    "moe": (tt.fused_moe_ep, s(32, 256), s(32, 2, dtype=F32), s(32, 2, dtype=I32), s(8, 256, 128), s(8, 256, 128), s(8, 128, 256)),  # fmt: skip
    "sparse matmul": (functools.partial(tt.sparse_matmul, nnz=4), s(2, 2, 32, 64), s(1, 8, 64, 128), s(2, 2, 1, 8)),
    "sampling": (functools.partial(tt.sampling, seed=3), s(32, 64), s(32, 64, dtype=I32), s(32, dtype=I32), s(32, dtype=F32), s(32, dtype=F32)),  # fmt: skip
    "marks": (moved, s(64, 64), s(32, 64)),
    **COMPOSITIONS,
}


def for_libtt(function, *shapes) -> str:
    """The program after our passes for libtt, as text."""
    context = modules.make_context()
    program = str(jax.jit(function, keep_unused=True).lower(*shapes).compiler_ir("stablehlo"))
    rewritten = pipeline.rewrite(context, program.encode(), "libtt", "1.17.0")
    return str(modules.parse(context, rewritten.program))


@pytest.fixture(scope="module")
def programs() -> dict[str, str]:
    return {name: for_libtt(*program) for name, program in PROGRAMS.items()}


@pytest.fixture(scope="module")
def errors(programs, compile_on_libtt):
    bad = programs["decode"].replace("has_cur_pos_tensor = true", "has_cur_pos_tensor = false")
    return compile_on_libtt(programs | {"a call that is wrong": bad})


def test_every_call_is_among_the_programs(programs):
    """No call that libtt lowers is left out here."""
    text = "\n".join(programs.values())
    assert {call for call in LIBTT_CALLS if f"@{call}(" in text} == LIBTT_CALLS


@pytest.mark.parametrize("name", PROGRAMS)
def test_libtt_compiles(errors, name):
    """The compiler takes the call as our code and passes spell it."""
    assert errors[name] == ""


def test_libtt_would_have_said_no(errors):
    """A call whose operands do not fit its attributes is refused: passing means something."""
    assert errors["a call that is wrong"] != ""
