"""Random numbers: seeds repeat them, and large samples have the right statistics."""

import pytest


@pytest.mark.parametrize("make", ("rand", "randn", "randperm", "bernoulli", "dropout", "multinomial"))
def test_a_seed_repeats(torch, make):
    """The same seed draws the same numbers; without a new seed they differ."""
    draw = {
        "rand": lambda: torch.rand(100, device="tpu"),
        "randn": lambda: torch.randn(100, device="tpu"),
        "randperm": lambda: torch.randperm(100, device="tpu"),
        "bernoulli": lambda: torch.full((100,), 0.5, device="tpu").bernoulli(),
        "dropout": lambda: torch.nn.functional.dropout(torch.ones(100, device="tpu")),
        "multinomial": lambda: torch.ones(100, device="tpu").multinomial(50),
    }[make]
    torch.manual_seed(5)
    first, second = draw().cpu(), draw().cpu()
    torch.manual_seed(5)
    assert torch.equal(draw().cpu(), first)
    assert not torch.equal(first, second)


def test_generators_are_independent(torch):
    """A generator of one's own repeats with its seed, and does not move the default one."""
    torch.manual_seed(1)
    expected = torch.rand(10, device="tpu").cpu()
    torch.manual_seed(1)
    first, second = (torch.rand(10, device="tpu", generator=torch.Generator("tpu").manual_seed(7)) for _ in range(2))
    assert torch.equal(first.cpu(), second.cpu())
    assert torch.equal(torch.rand(10, device="tpu").cpu(), expected)


@pytest.mark.parametrize(
    ("make", "mean", "deviation"),
    (
        ("rand", 0.5, 12**-0.5),
        ("randn", 0.0, 1.0),
        ("exponential_", 1.0, 1.0),
        ("randint", 4.5, 8.25**0.5),
        ("bernoulli", 0.3, 0.21**0.5),
    ),
)
def test_statistics(torch, make, mean, deviation):
    """A million draws have the distribution's mean and deviation within five standard errors, and no trend."""
    n = 1 << 20
    x = {
        "rand": lambda: torch.rand(n, device="tpu"),
        "randn": lambda: torch.randn(n, device="tpu"),
        "exponential_": lambda: torch.empty(n, device="tpu").exponential_(),
        "randint": lambda: torch.randint(0, 10, (n,), device="tpu"),
        "bernoulli": lambda: torch.full((n,), 0.3, device="tpu").bernoulli(),
    }[make]()
    x = x.cpu().double()
    error = deviation / n**0.5
    assert abs(x.mean() - mean) < 5 * error
    kurtosis = float(((x - mean) / deviation).pow(4).mean())
    assert abs(x.std() - deviation) < 5 * error * ((kurtosis - 1) / 4 + 1e-3) ** 0.5
    assert abs(torch.corrcoef(torch.stack([x[1:], x[:-1]]))[0, 1]) < 5 / n**0.5
    assert abs(x[: n // 2].mean() - x[n // 2 :].mean()) < 10 * error


def test_dropout_keeps_the_mean(torch):
    """Dropout zeroes its share of the elements and scales the rest; backward uses the same mask."""
    x = torch.ones(1 << 18, device="tpu", requires_grad=True)
    y = torch.nn.functional.dropout(x, 0.25)
    y.sum().backward()
    kept = y.detach().cpu()
    assert set(kept.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.75))}
    assert abs((kept == 0).float().mean() - 0.25) < 5 * (0.25 * 0.75 / (1 << 18)) ** 0.5
    assert torch.equal(x.grad.cpu(), kept)
