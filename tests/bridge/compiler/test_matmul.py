"""The emulated chip's own matmul: right for every shape, type, layout and instruction set that this CPU has."""

import threading

import chip
import ml_dtypes
import numpy as np
import pypjrt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}
INSTRUCTION_SETS = ("avx512bf16", "avx512", "avx2", "generic")


def call(x: np.ndarray, weights: np.ndarray, nk: bool, result: str, isa: str = "") -> np.ndarray:
    """The handler itself, through a custom call."""
    types = {np.dtype(np.float32): "f32", np.dtype(ml_dtypes.bfloat16): "bf16"}
    kind = types[x.dtype]
    m, n = x.shape[0], weights.shape[0 if nk else 1]
    a, b = ("x".join(map(str, array.shape)) for array in (x, weights))
    config = f"nk = {str(nk).lower()}" + (f', isa = "{isa}"' if isa else "")
    (out,) = chip.execute(
        f"""func.func @main(%x: tensor<{a}x{kind}>, %w: tensor<{b}x{kind}>) -> tensor<{m}x{n}x{result}> {{
        %r = stablehlo.custom_call @tt_tpu.matmul(%x, %w) {{api_version = 4 : i32, backend_config = {{{config}}}}}
          : (tensor<{a}x{kind}>, tensor<{b}x{kind}>) -> tensor<{m}x{n}x{result}>
        return %r : tensor<{m}x{n}x{result}> }}""",
        x,
        weights,
    )
    return out


def operands(m: int, n: int, k: int, dtype: str, nk: bool, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (n, k) if nk else (k, n)
    return rng.standard_normal((m, k)).astype(DTYPES[dtype]), rng.standard_normal(shape).astype(DTYPES[dtype])


def reference(x: np.ndarray, weights: np.ndarray, nk: bool) -> np.ndarray:
    wide = weights.astype(np.float64)
    return x.astype(np.float64) @ (wide.T if nk else wide)


def available(isa: str) -> bool:
    flags = open("/proc/cpuinfo").read()
    needed = {"avx512bf16": "avx512_bf16", "avx512": "avx512f", "avx2": "avx2", "generic": ""}
    return needed[isa] in flags


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("nk", [True, False], ids=["nk", "kn"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5, 7), (3, 33, 65), (4, 64, 64), (7, 301, 129), (33, 130, 70)], ids=str)
def test_every_instruction_set_computes_the_product(isa, nk, dtype, shape):
    """Sums in float32 agree with float64 to their rounding; a CPU without the instruction set says so instead."""
    x, weights = operands(*shape, dtype, nk)
    if not available(isa):
        with pytest.raises(pypjrt.errors.PjrtError, match=isa):
            call(x, weights, nk, "f32", isa)
        return
    out = call(x, weights, nk, "f32", isa)
    np.testing.assert_allclose(out, reference(x, weights, nk), rtol=1e-5, atol=1e-5 * np.sqrt(shape[2]))


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(1, 70),
    n=st.integers(1, 300),
    k=st.integers(1, 300),
    dtype=st.sampled_from(tuple(DTYPES)),
    nk=st.booleans(),
    seed=st.integers(0, 9),
)
def test_any_shape(m, n, k, dtype, nk, seed):
    """Odd sizes, single rows and columns, many rows: the whole result is written and right."""
    m = m if nk else min(m, 64)
    x, weights = operands(m, n, k, dtype, nk, seed)
    np.testing.assert_allclose(
        call(x, weights, nk, "f32"), reference(x, weights, nk), rtol=1e-5, atol=1e-5 * np.sqrt(k)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_than_are_copied_at_once(dtype):
    """Thousands of rows are taken in parts, and each part lands where it belongs."""
    x, weights = operands(2500, 24, 40, dtype, True)
    np.testing.assert_allclose(call(x, weights, True, "f32"), reference(x, weights, True), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("nk", [True, False], ids=["nk", "kn"])
def test_a_bfloat16_result_is_rounded_once(nk):
    """The float32 sum is rounded to the nearest bfloat16, not accumulated in it."""
    x, weights = operands(3, 40, 512, "bf16", nk)
    rounded = reference(x, weights, nk).astype(np.float32).astype(ml_dtypes.bfloat16)
    out = call(x, weights, nk, "bf16")
    # A sum that lies at a boundary may fall to either side.
    np.testing.assert_allclose(out.astype(np.float32), rounded.astype(np.float32), rtol=2**-7)
    assert (out == rounded).mean() > 0.95


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("nk", [True, False], ids=["nk", "kn"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_in_its_row_and_column(value, nk, dtype):
    """NaN and infinity reach the results that they belong to and no others, at the edges of a vector too."""
    x, weights = operands(5, 37, 33, dtype, nk)
    x[2, 32] = value
    out = call(x, weights, nk, dtype).astype(np.float32)
    assert not np.isfinite(out[2]).any()
    assert np.isfinite(np.delete(out, 2, axis=0)).all()


def test_products_at_once_do_not_disturb_each_other():
    """Programs that run at the same time share XLA's threads and still end, each with its own result."""
    x, weights = operands(4, 4096, 256, "bf16", True)
    expected, wrong = call(x, weights, True, "f32"), []

    def work():
        for _ in range(5):
            if not np.array_equal(call(x, weights, True, "f32"), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def product(
    left: str, right: str, result: str, dims: str, element: str = "f32", before: str = "", rhs: str = "%w"
) -> str:
    """A module with one dot_general; `before` may define what `rhs` names."""
    types = [f"tensor<{shape}x{element}>" for shape in (left, right, result)]
    operand = types[1] if rhs == "%w" else before.rsplit("-> ", 1)[1].strip()
    return f"""func.func @main(%x: {types[0]}, %w: {types[1]}) -> {types[2]} {{
    {before}
    %r = stablehlo.dot_general %x, {rhs}, contracting_dims = {dims} : ({types[0]}, {operand}) -> {types[2]}
    return %r : {types[2]} }}"""


TRANSPOSE = "%t = stablehlo.transpose %w, dims = [1, 0] : (tensor<96x64x{0}>) -> tensor<64x96x{0}>"


@pytest.mark.parametrize("element", DTYPES)
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_a_linear_layer_is_ours(element, rows):
    """F.linear as torch_tpu sends it, transpose and dot, reads the weights as they lie in memory."""
    text = product(f"{rows}x64", "96x64", f"{rows}x96", "[1] x [0]", element, TRANSPOSE.format(element), "%t")
    rewritten = chip.rewrite(text)
    assert "tt_tpu.matmul(%arg0, %arg1)" in rewritten and "nk = true" in rewritten
    x, weights = operands(rows, 96, 64, element, True)
    (out,) = chip.run(text, x, weights)
    rounding = 1e-5 if element == "f32" else 2**-8
    np.testing.assert_allclose(out.astype(np.float64), reference(x, weights, True), rtol=rounding, atol=1e-4)


def test_more_axes_are_flattened():
    """[batch, tokens, K] times weights, and K that is spread over two axes."""
    text = product("2x3x8x8", "96x8x8", "2x3x96", "[2, 3] x [1, 2]")
    assert "tt_tpu.matmul" in chip.rewrite(text)
    x, weights = operands(6, 96, 64, "f32", True)
    (out,) = chip.run(text, x.reshape(2, 3, 8, 8), weights.reshape(96, 8, 8))
    np.testing.assert_allclose(out.reshape(6, 96), reference(x, weights, True), atol=1e-4)


@pytest.mark.parametrize("rows", [1, 5])
def test_weights_on_the_left_are_ours(rows):
    """A matrix times few columns, as torch.mv is, reads the matrix as weights."""
    text = product("96x64", f"{rows}x64", f"96x{rows}", "[1] x [1]")
    assert "tt_tpu.matmul(%arg1, %arg0)" in chip.rewrite(text)
    x, weights = operands(rows, 96, 64, "f32", True)
    (out,) = chip.run(text, weights, x)
    np.testing.assert_allclose(out, reference(x, weights, True).T, atol=1e-4)


@pytest.mark.parametrize(
    "text",
    [
        product("4x8", "8x16", "4x16", "[1] x [0]"),
        product("100x64", "64x96", "100x96", "[1] x [0]"),
        product("4x64", "64x96", "4x96", "[1] x [0]", "f16"),
        product("4x64", "64x96", "4x96", "[1] x [0]", "f64"),
    ],
    ids=["small", "many rows", "f16", "f64"],
)
def test_the_rest_is_left_to_xla(text):
    """Small products, many rows of [K, N] weights and other types stay as they are."""
    assert "dot_general" in chip.rewrite(text) and "tt_tpu.matmul" not in chip.rewrite(text)


def test_libtt_keeps_its_products():
    """The silicon's compiler never sees the emulated chip's calls."""
    text = product("4x64", "96x64", "4x96", "[1] x [1]")
    assert "dot_general" in chip.rewrite(text, "libtt")
