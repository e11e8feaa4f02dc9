"""JAX kernels that torch_tpu takes in as operators: replaced ones make tt.* calls, others are interpreted."""

import math


def test_a_replaced_kernel_as_an_operator(torch):
    """JAX's ragged paged attention through jax_op, on tensors of the chip, is what the formula says."""
    import functools

    import jax
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel
    from torch_tpu._internal.pallas import jax_op

    assert hasattr(kernel.ragged_paged_attention, "__tt_tpu_replaces__")

    def attend(q: jax.Array, pages: jax.Array, lengths: jax.Array, table: jax.Array, starts: jax.Array,
               count: jax.Array) -> jax.Array:  # fmt: skip
        return functools.partial(kernel.ragged_paged_attention, sm_scale=0.125)(q, pages, lengths, table, starts, count)

    operator = jax_op("kernels_test::ragged", attend)
    torch.manual_seed(0)
    q, pages = torch.randn(9, 4, 64), torch.randn(8, 32, 4, 64)
    integers = [[40, 8], [[3, 5], [1, 0]], [0, 1, 9], [2]]
    arrays = [q, pages, *(torch.tensor(x, dtype=torch.int32) for x in integers)]
    out = operator(*(x.to("tpu") for x in arrays)).cpu()
    for sequence, (length, pages_of, first, last) in enumerate(((40, [3, 5], 0, 1), (8, [1], 1, 9))):
        rows = pages[pages_of].reshape(-1, 4, 64)[:length]
        keys, values = (rows[:, i::2].repeat_interleave(2, 1).transpose(0, 1) for i in (0, 1))
        scores = q[first:last].transpose(0, 1) @ keys.mT * 0.125
        new = last - first
        seen = torch.arange(length) <= torch.arange(length - new, length)[:, None]
        expected = (scores.masked_fill(~seen, -math.inf).softmax(-1) @ values).transpose(0, 1)
        torch.testing.assert_close(out[first:last], expected, rtol=1e-4, atol=1e-5, msg=f"sequence {sequence}")


def test_an_unknown_kernel_as_an_operator(torch):
    """A Pallas kernel of a user's own through jax_op is interpreted, and computes its numbers."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from torch_tpu._internal.pallas import jax_op

    def kernel(x, out):
        out[...] = jnp.sin(x[...]) + pl.program_id(0).astype(jnp.float32)

    def shifted(x: jax.Array) -> jax.Array:
        spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, grid=(x.shape[0] // 8,), in_specs=[spec], out_specs=spec)(x)

    operator = jax_op("kernels_test::shifted", shifted)
    x = torch.randn(24, 128)
    expected = x.sin() + torch.arange(3).repeat_interleave(8)[:, None]
    torch.testing.assert_close(operator(x.to("tpu")).cpu(), expected, rtol=1e-5, atol=1e-5)


def test_splash_attention(torch):
    """torch_tpu's own splash attention, forward and backward."""
    from torch_tpu._internal.ops.splash_attention import splash_sdpa

    torch.manual_seed(0)
    arrays = [torch.randn(2, 4, 128, 64, requires_grad=True) for _ in range(3)]
    there = [x.detach().to("tpu").requires_grad_() for x in arrays]
    weight = torch.randn(2, 4, 128, 64)
    expected = torch.nn.functional.scaled_dot_product_attention(*arrays, is_causal=True)
    (expected * weight).sum().backward()
    out = splash_sdpa(*there)
    (out * weight.to("tpu")).sum().backward()
    torch.testing.assert_close(out.cpu().detach(), expected.detach(), rtol=1e-4, atol=1e-4)
    for mine, reference in zip(there, arrays, strict=True):
        torch.testing.assert_close(mine.grad.cpu(), reference.grad, rtol=1e-3, atol=1e-4)
