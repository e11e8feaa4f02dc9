"""Gradients, optimizers and torch.compile on the chip give the CPU's numbers."""

import copy

import pytest


def network(torch):
    """A small network with the layers that most models have."""
    layers = (torch.nn.Embedding(11, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.GELU())
    return torch.nn.Sequential(*layers, torch.nn.Linear(32, 11))


def train(torch, model, place, optimizer, options, steps=4, compiled=False):
    """Losses and final weights of a few steps on fixed data."""
    model = copy.deepcopy(model).to(place)
    step = torch.compile(model) if compiled else model
    optimizer = getattr(torch.optim, optimizer)(model.parameters(), **options)
    tokens = torch.arange(40).reshape(4, 10).remainder(11).to(place)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(step(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    (
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("SGD", {"lr": 0.1, "foreach": True}),
        ("AdamW", {"lr": 0.01, "foreach": False}),
        ("AdamW", {"lr": 0.01, "foreach": True}),
        ("AdamW", {"lr": 0.01, "fused": True}),
        ("Adam", {"lr": 0.01, "amsgrad": True}),
        ("RMSprop", {"lr": 0.01}),
    ),
)
def test_optimizers(torch, optimizer, options):
    """A few steps of every kind of optimizer lead to the CPU's losses and weights."""
    model = network(torch)
    losses, weights = train(torch, model, "tpu", optimizer, options)
    expected_losses, expected = train(torch, model, "cpu", optimizer, options)
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-4)


def test_a_compiled_model_trains(torch):
    """torch.compile forward and backward give the eager CPU's losses and weights."""
    model = network(torch)
    losses, weights = train(torch, model, "tpu", "AdamW", {"lr": 0.01}, compiled=True)
    expected_losses, expected = train(torch, model, "cpu", "AdamW", {"lr": 0.01})
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-4)


def test_higher_derivatives(torch):
    """The gradient of a gradient is right, against its formula."""
    x = torch.linspace(-1, 1, 9, device="tpu", requires_grad=True)
    (first,) = torch.autograd.grad(x.tanh().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    t = x.detach().cpu().tanh()
    torch.testing.assert_close(second.cpu(), -2 * t * (1 - t * t), rtol=1e-5, atol=1e-6)


def test_a_function_of_ones_own(torch):
    """torch.autograd.Function runs its own backward on the chip."""

    class Clip(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clamp(-1, 1)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * (x.abs() < 1) * 3

    x = torch.tensor([-2.0, 0.5, 4.0], device="tpu", requires_grad=True)
    Clip.apply(x).sum().backward()
    assert x.grad.tolist() == [0.0, 3.0, 0.0]


def test_compile_of_changing_shapes(torch):
    """A compiled function is right for each new shape."""

    @torch.compile
    def function(x):
        return (x * 2).softmax(-1) @ x.mT

    for rows in (3, 5, 8, 3):
        x = torch.randn(rows, 6)
        expected = (x * 2).softmax(-1) @ x.mT
        torch.testing.assert_close(function(x.to("tpu")).cpu(), expected, rtol=1e-5, atol=1e-5)


def test_compile_that_writes_to_its_input(torch):
    """A compiled function may write to its argument, whose other views see it."""

    @torch.compile
    def function(cache, index, value):
        cache.index_copy_(0, index, value)
        return cache.sum()

    cache = torch.zeros(8, 4, device="tpu")
    view = cache[5]
    total = function(cache, torch.tensor([2, 5], device="tpu"), torch.ones(2, 4, device="tpu"))
    assert total.item() == 8 and view.tolist() == [1.0] * 4
    assert cache.cpu().sum(1).tolist() == [0, 0, 4, 0, 0, 4, 0, 0]
