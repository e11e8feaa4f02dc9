"""What a kernel of the chip cannot take is refused before the call, by name."""

import functools

import jax
import jax.numpy as jnp
import pytest

from kernels_replacements import tt_calls
from kernels_replacements.errors import KernelError

S = jax.ShapeDtypeStruct
I32, F32, BF16 = jnp.int32, jnp.float32, jnp.bfloat16


def trace(function, *shapes):
    return jax.eval_shape(function, *shapes)


def decode(batch=2, heads=4, kv_heads=2, dim=64, page=64, width=8, dtype=BF16, table=I32, **options):
    cache = S((16, kv_heads, page, dim), dtype)
    call = functools.partial(tt_calls.paged_attention_decode, **options)
    return trace(call, S((1, batch, heads, dim), dtype), cache, cache, S((batch, width), table), S((batch,), I32))


def test_a_call_has_its_results_shape():
    """What fits is traced, and gives the shape that the docstring promises."""
    assert decode().shape == (1, 2, 4, 64)
    assert decode(dim=96, page=128, heads=16, kv_heads=1, dtype=F32).dtype == F32


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"page": 16}, "page size 16 is not one of"),
        ({"dim": 80}, "head dimension 80 is not one of"),
        ({"width": 12}, "12 wide; pad it with -1 to a multiple of 8"),
        ({"heads": 3}, "3 query heads are no multiple of 2"),
        ({"dtype": jnp.float16}, "must be one of float32, bfloat16"),
        ({"table": jnp.int16}, "page_table is int16"),
        ({"sliding_window": 0}, "sliding_window 0"),
        ({"is_causal": False}, "give a mask or is_causal"),
    ),
)
def test_what_decode_attention_cannot_take(options, message):
    """Each limit is named with the value that broke it."""
    with pytest.raises(KernelError, match=message):
        decode(**options)


def test_new_values_must_have_the_caches_dtype():
    """Mixed dtypes corrupt a cache on hardware."""
    cache, table = S((4, 1, 64, 64), BF16), S((1, 8), I32)
    with pytest.raises(KernelError, match="x is float32"):
        trace(tt_calls.paged_update_cache, cache, S((1, 1, 1, 64), F32), S((1,), I32), table)
    with pytest.raises(KernelError, match="x is float32"):
        trace(tt_calls.paged_fill_cache, cache, S((1, 1, 8, 64), F32), table)


def test_a_prompt_must_fit_its_table():
    """More positions than a page table holds are an error."""
    cache, table = S((4, 1, 32, 64), F32), S((1, 8), I32)
    with pytest.raises(KernelError, match="300 positions do not fit a page table of 256"):
        trace(tt_calls.paged_fill_cache, cache, S((1, 1, 300, 64), F32), table)


def test_a_chunk_must_be_whole_tiles():
    """A chunk of prefill is a multiple of 32 tokens."""
    cache = S((4, 1, 64, 64), F32)
    with pytest.raises(KernelError, match="multiple of 32"):
        trace(tt_calls.chunked_attention, S((1, 1, 40, 64), F32), cache, cache, S((1, 8), I32), S((1,), I32))


def test_weight_dtypes_are_known():
    """A block float that libtt does not have is refused."""
    with pytest.raises(KernelError, match="fp4"):
        trace(functools.partial(tt_calls.weight_dtype_override, dtype="fp4"), S((4, 4), F32))
