"""LuDecomposition on the emulated chip: P A = L U with partial pivoting, as LAPACK and the TPU have it."""

import chip
import numpy as np
import pytest

TYPES = {np.float32: "f32", np.float64: "f64", np.complex64: "complex<f32>", np.complex128: "complex<f64>"}
LIMITS = {np.float32: 1e-5, np.float64: 1e-13, np.complex64: 1e-5, np.complex128: 1e-13}


def decompose(a: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """lu [..., m, n], pivots [..., min(m, n)] and rows [..., m], both counted from 0."""
    *batch, m, n = a.shape
    kind = TYPES[a.dtype.type]

    def tensor(*axes, of):
        return f"tensor<{'x'.join(map(str, (*batch, *axes)))}x{of}>"

    whole, pivots, rows = tensor(m, n, of=kind), tensor(min(m, n), of="i32"), tensor(m, of="i32")
    return chip.run(
        f"""func.func @main(%a: {whole}) -> ({whole}, {pivots}, {rows}) {{
        %r:3 = stablehlo.custom_call @LuDecomposition(%a) {{api_version = 4 : i32}}
          : ({whole}) -> ({whole}, {pivots}, {rows})
        return %r#0, %r#1, %r#2 : {whole}, {pivots}, {rows} }}""",
        a,
    )


def random(dtype, *shape, seed=0):
    rng = np.random.default_rng(seed)
    a = rng.standard_normal(shape)
    return (a + 1j * rng.standard_normal(shape) if np.issubdtype(dtype, np.complexfloating) else a).astype(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1), (5, 5), (7, 4), (4, 7), (70, 70), (100, 33), (33, 100), (2, 3, 6, 6)], ids=str
)
def test_the_factors_multiply_back(dtype, shape):
    """Rows of A in the order given are L U; every multiplier is at most 1 in size, which is what pivoting is for."""
    a = random(dtype, *shape)
    lu, _, rows = decompose(a)
    rank = min(shape[-2:])
    lower = np.tril(lu[..., :, :rank], -1) + np.eye(shape[-2], rank, dtype=dtype)
    upper = np.triu(lu[..., :rank, :])
    permuted = np.take_along_axis(a, rows[..., None], axis=-2)
    np.testing.assert_allclose(lower @ upper, permuted, atol=LIMITS[dtype] * shape[-1])
    assert np.abs(lower).max() <= np.sqrt(2) + 1e-6


def test_pivots_and_rows_tell_the_same_exchanges():
    """Exchanging row i with row pivots[i], in turn, gives the order of the rows."""
    _, pivots, rows = decompose(random(np.float64, 40, 40))
    order = np.arange(40)
    for i, pivot in enumerate(pivots):
        assert pivot >= i
        order[[i, pivot]] = order[[pivot, i]]
    np.testing.assert_array_equal(order, rows)


def test_a_singular_matrix_has_a_zero_on_the_diagonal():
    """No division by zero: the zero pivot stays in U, where a solver finds it."""
    a = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [1.0, 1.0, 1.0]])
    lu, _, rows = decompose(a)
    lower, upper = np.tril(lu, -1) + np.eye(3), np.triu(lu)
    np.testing.assert_allclose(lower @ upper, a[rows])
    assert np.isfinite(lu).all() and abs(np.prod(np.diag(upper))) < 1e-12


def test_nan_does_not_hide():
    """A NaN in the matrix is a NaN in its factors."""
    a = random(np.float32, 5, 5)
    a[2, 2] = np.nan
    assert np.isnan(decompose(a)[0]).any()
