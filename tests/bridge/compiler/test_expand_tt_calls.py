"""The `tt.*` calls are opened for the emulated chip and spelled for libtt."""

import chip
import numpy as np
import pytest

from bridge.compiler.tt_calls import LIBTT_CALLS
from bridge.errors import CompileError


def marked(target, result="tensor<4xf32>", attributes='{backend_config = {ttir.name = "w", ttcore.argument_type = "parameter"}, api_version = 4 : i32}'):  # fmt: skip
    return f"""module {{ func.func public @main(%a: tensor<4xf32>) -> {result} {{
      %0 = stablehlo.custom_call @{target}(%a) {attributes} : (tensor<4xf32>) -> {result}
      return %0 : {result} }} }}"""


def test_the_emulator_knows_what_libtt_knows():
    """Every call that libtt lowers has a meaning on the emulated chip, and none beyond."""
    from bridge.emulator.calls import CALLS

    assert set(CALLS) == LIBTT_CALLS


def test_a_mark_is_the_value_itself():
    """Marks for libtt's memory planning change no number on the emulated chip."""
    a = np.arange(4, dtype=np.float32)
    (got,) = chip.run(marked("tt.mark_argument"), a)
    np.testing.assert_array_equal(got, a)


def test_libtt_gets_metadata_as_strings():
    """Attributes of a call that libtt reads from frontend attributes stand there, and nowhere else."""
    text = chip.rewrite(marked("tt.mark_argument"), "libtt")
    assert 'mhlo.frontend_attributes = {ttcore.argument_type = "parameter", ttir.name = "w"}' in text
    assert "backend_config = {" not in text


def test_libtt_gets_other_attributes_as_they_are():
    """A call with typed attributes keeps them."""
    attributes = '{backend_config = {ttcore.weight_dtype = "bfp_bf8"}, api_version = 4 : i32}'
    text = chip.rewrite(marked("tt.weight_dtype_override", attributes=attributes), "libtt")
    assert 'backend_config = {ttcore.weight_dtype = "bfp_bf8"}' in text


def test_metadata_strings_mean_the_same_on_the_emulated_chip():
    """A call written with string metadata, as other programs write it, is understood."""
    attributes = """{api_version = 4 : i32, mhlo.frontend_attributes = {is_causal = "True", scale = "0.125",
      has_attention_mask = "False", has_attention_sink = "False"}}"""
    kind = "tensor<1x1x32x64xf32>"
    program = f"""module {{ func.func public @main(%q: {kind}, %k: {kind}, %v: {kind}) -> {kind} {{
      %0 = stablehlo.custom_call @tt.scaled_dot_product_attention(%q, %k, %v) {attributes} : ({kind}, {kind}, {kind}) -> {kind}
      return %0 : {kind} }} }}"""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 32, 64)).astype(np.float32)
    (got,) = chip.run(program, q, k, v)
    scores = np.where(np.tri(32, dtype=bool), q[0, 0].astype(np.float64) @ k[0, 0].T * 0.125, -np.inf)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    np.testing.assert_allclose(got[0, 0], weights / weights.sum(1, keepdims=True) @ v[0, 0], atol=1e-5)


@pytest.mark.parametrize(
    ("program", "message"),
    (
        (marked("tt.no_such_call"), "tt.no_such_call"),
        (marked("tt.mark_argument", result="tensor<5xf32>"), r"computes float32\[4\]"),
        (marked("tt.state_pool_update"), "not a call that the chip knows"),
    ),
)
def test_a_call_that_does_not_fit_is_an_error(program, message):
    """An unknown call, other result types or missing operands are named, not computed."""
    with pytest.raises(CompileError, match=message):
        chip.rewrite(program)
