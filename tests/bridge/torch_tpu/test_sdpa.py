"""F.scaled_dot_product_attention in all its forms is softmax(q k' / sqrt(d) + mask) v, forward and backward."""

import math

import pytest


def reference(torch, q, k, v, mask=None, causal=False, scale=None, grouped=False):
    """The formula in float64; a boolean mask keeps where it is true."""
    if grouped:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (scale or 1 / math.sqrt(q.shape[-1]))
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ v


# q's shape, k's and v's shape, options
FORMS = {
    "plain": ((2, 4, 128, 64), (2, 4, 128, 64), {}),
    "causal": ((1, 4, 128, 64), (1, 4, 128, 64), {"causal": True}),
    "odd": ((1, 3, 37, 20), (1, 3, 37, 20), {"causal": True}),
    "long": ((1, 2, 512, 128), (1, 2, 512, 128), {"causal": True}),
    "decode": ((4, 4, 1, 64), (4, 4, 256, 64), {}),
    "crossed": ((2, 4, 64, 64), (2, 4, 192, 64), {}),
    "scale": ((1, 2, 128, 64), (1, 2, 128, 64), {"scale": 0.3}),
    "grouped": ((2, 8, 128, 64), (2, 2, 128, 64), {"causal": True, "grouped": True}),
    "boolean mask": ((2, 4, 128, 64), (2, 4, 128, 64), {"mask": "bool"}),
    "float mask": ((2, 4, 128, 64), (2, 4, 128, 64), {"mask": "float"}),
    "broadcast mask": ((2, 4, 64, 64), (2, 4, 64, 64), {"mask": "rows"}),
    "three dimensions": ((4, 128, 64), (4, 128, 64), {}),
}


def inputs(torch, form, dtype):
    """q, k, v and the mask on the CPU, and the options."""
    query, key, options = FORMS[form]
    options = dict(options)
    q, k, v = (torch.randn(shape).to(getattr(torch, dtype)) for shape in (query, key, key))
    kind, rows, columns = options.pop("mask", None), query[-2], key[-2]
    mask = {
        None: lambda: None,
        "bool": lambda: torch.rand(rows, columns).gt(0.3) | torch.eye(rows, columns, dtype=torch.bool),
        "float": lambda: torch.randn(*query[:-2], rows, columns).to(q.dtype),
        "rows": lambda: torch.rand(query[0], 1, 1, columns).gt(0.3) | (torch.arange(columns) == 0),
    }[kind]()
    return q, k, v, mask, options


def attention(torch, q, k, v, mask, options):
    """torch's function, with the options under torch's names."""
    names = {"causal": "is_causal", "scale": "scale", "grouped": "enable_gqa"}
    arguments = {names[name]: value for name, value in options.items()}
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **arguments)


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("form", FORMS)
def test_forward(torch, form, dtype, compiled):
    """Every form gives the formula's numbers, eager and compiled."""
    q, k, v, mask, options = inputs(torch, form, dtype)
    expected = reference(torch, q.double(), k.double(), v.double(), mask, **options)
    function = torch.compile(attention) if compiled else attention
    moved = [x if x is None else x.to("tpu") for x in (q, k, v, mask)]
    result = function(torch, *moved, options).cpu()
    limit = 2e-5 if dtype == "float32" else 2e-2
    assert result.dtype == q.dtype
    torch.testing.assert_close(result.double(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
@pytest.mark.parametrize("form", ("plain", "causal", "grouped", "boolean mask", "float mask", "crossed"))
def test_backward(torch, form, compiled):
    """The gradients of q, k and v are the formula's."""
    q, k, v, mask, options = inputs(torch, form, "float32")
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected = reference(torch, *wide, mask, **options)
    weights = torch.randn_like(q)
    expected.backward(weights.double())
    moved = [x.to("tpu").requires_grad_() for x in (q, k, v)]
    function = torch.compile(attention) if compiled else attention
    function(torch, *moved, None if mask is None else mask.to("tpu"), options).backward(weights.to("tpu"))
    for mine, right in zip(moved, wide, strict=True):
        torch.testing.assert_close(mine.grad.cpu().double(), right.grad, rtol=1e-4, atol=1e-4)


def test_dropout_keeps_the_mean(torch):
    """With dropout the results scatter around those without."""
    q, k, v = (torch.randn(1, 64, 128, 64, device="tpu") for _ in range(3))
    function = torch.nn.functional.scaled_dot_product_attention
    plain, dropped = function(q, k, v).cpu(), function(q, k, v, dropout_p=0.2).cpu()
    difference = dropped - plain
    assert difference.abs().mean() > 0.01
    assert abs(difference.mean()) < 5 * difference.std() / difference.numel() ** 0.5


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_a_learned_mask(torch, compiled):
    """A mask that asks for a gradient, as a learned bias does, gets the formula's."""
    q, k, v, _, options = inputs(torch, "plain", "float32")
    bias = torch.randn(4, 128, 128)
    wide = bias.double().requires_grad_()
    reference(torch, q.double(), k.double(), v.double(), wide, **options).sin().sum().backward()
    mine = bias.to("tpu").requires_grad_()
    function = torch.compile(attention) if compiled else attention
    function(torch, q.to("tpu"), k.to("tpu"), v.to("tpu"), mine, options).sin().sum().backward()
    torch.testing.assert_close(mine.grad.cpu().double(), wide.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_dropout_backward(torch, compiled):
    """With dropout, gradients belong to the mask of the forward pass: they give the change under the same seed."""
    q, k, v = (torch.randn(1, 4, 128, 64, device="tpu") for _ in range(3))
    weights = torch.randn(1, 4, 128, 64, device="tpu")

    def function(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3)

    def loss(q, k, v):
        torch.manual_seed(11)
        return ((torch.compile(function) if compiled else function)(q, k, v) * weights).sum()

    for index in range(3):
        moved = [x.clone().requires_grad_(place == index) for place, x in enumerate((q, k, v))]
        loss(*moved).backward()
        direction = torch.randn_like(q) * 0.01
        ahead, behind = ([x.detach() + sign * direction * (place == index) for place, x in enumerate(moved)] for sign in (1, -1))  # fmt: skip
        change = (loss(*ahead) - loss(*behind)).item() / 2
        assert change == pytest.approx((moved[index].grad * direction).sum().item(), rel=2e-2, abs=2e-3)
