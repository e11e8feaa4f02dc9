"""Linear algebra that torch_tpu has: each decomposition multiplies back, each solution solves."""

import pytest

# Relative to the matrix; the well-conditioned matrices below lose no digits.
LIMITS = {"float32": 2e-5, "float64": 1e-12, "complex64": 2e-5}


def matrix(torch, dtype, *shape):
    """A well-conditioned random matrix, or a batch of them."""
    x = torch.randn(*shape, dtype=getattr(torch, dtype))
    return x + 4 * torch.eye(*shape[-2:], dtype=x.dtype) if shape[-2] == shape[-1] else x


def close(torch, a, b, dtype):
    torch.testing.assert_close(a, b, rtol=LIMITS[dtype], atol=10 * LIMITS[dtype])


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("shape", ((5, 5), (3, 4, 4), (20, 20)), ids=str)
def test_inverse_and_solve(torch, shape, dtype):
    """inv(A) A is the identity, solve(A, B) solves."""
    a, b = matrix(torch, dtype, *shape), matrix(torch, dtype, *shape[:-1], 2)
    on_chip = a.to("tpu")
    identity = torch.eye(shape[-1], dtype=a.dtype).expand(shape)
    close(torch, torch.linalg.inv(on_chip).cpu() @ a, identity, dtype)
    close(torch, a @ torch.linalg.solve(on_chip, b.to("tpu")).cpu(), b, dtype)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("shape", ((4, 4), (7, 5), (5, 7), (2, 6, 3)), ids=str)
def test_lu_and_qr(torch, shape, dtype):
    """P L U and Q R are the matrix; Q's columns are orthonormal."""
    a = matrix(torch, dtype, *shape)
    on_chip = a.to("tpu")
    p, lower, upper = (x.cpu() for x in torch.linalg.lu(on_chip))
    close(torch, p @ lower @ upper, a, dtype)
    q, r = (x.cpu() for x in torch.linalg.qr(on_chip))
    close(torch, q @ r, a, dtype)
    close(torch, q.mH @ q, torch.eye(q.shape[-1], dtype=a.dtype).expand(*shape[:-2], -1, -1), dtype)


@pytest.mark.parametrize("dtype", LIMITS)
def test_singular_values(torch, dtype):
    """U diag(s) V' is the matrix, to the 1e-8 at which XLA's iteration stops; the values are sorted."""
    a = matrix(torch, dtype, 3, 6, 4)
    u, s, vh = (x.cpu() for x in torch.linalg.svd(a.to("tpu"), full_matrices=False))
    limit = max(LIMITS[dtype], 1e-8)
    torch.testing.assert_close((u * s.unsqueeze(-2)) @ vh, a, rtol=limit, atol=10 * limit)
    assert (s.diff() <= 0).all()


@pytest.mark.parametrize("operation", ("inv", "solve", "qr", "svd"))
def test_gradients(torch, operation):
    """Gradients through a decomposition are the CPU's."""

    def function(a):
        b = torch.arange(8.0, dtype=a.dtype, device=a.device).reshape(4, 2)
        return {
            "inv": lambda: torch.linalg.inv(a),
            "solve": lambda: torch.linalg.solve(a, b),
            "qr": lambda: torch.linalg.qr(a)[1].abs(),
            "svd": lambda: torch.linalg.svd(a)[1],
        }[operation]().sin().sum()

    a = matrix(torch, "float32", 4, 4)
    on_chip, wide = a.to("tpu").requires_grad_(), a.double().requires_grad_()
    function(on_chip).backward()
    function(wide).backward()
    torch.testing.assert_close(on_chip.grad.cpu().double(), wide.grad, rtol=1e-3, atol=1e-4)


def test_a_singular_matrix_is_an_error_or_infinite(torch):
    """The inverse of a singular matrix is never finite numbers."""
    singular = torch.tensor([[1.0, 2.0], [2.0, 4.0]], device="tpu")
    try:
        inverse = torch.linalg.inv(singular).cpu()
    except RuntimeError as error:
        assert "singular" in str(error)
    else:
        assert not inverse.isfinite().all()
