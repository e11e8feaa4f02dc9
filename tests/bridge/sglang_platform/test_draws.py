"""Drawing tokens on the host."""

import pytest
import torch

from bridge.sglang_platform.draws import Filters, draw, uniform

VOCABULARY = 5000
ALL = 1 << 30


def distribution(seed: int, sharpness: float) -> torch.Tensor:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))
    return (logits * sharpness).softmax(0)


def expected(probabilities: torch.Tensor, filters: Filters, number: float) -> int:
    """The filters on a whole sorted vocabulary, and the inverse of the cumulated weights."""
    weights, tokens = probabilities.sort(descending=True, stable=True)
    before = weights.double().cumsum(0) - weights
    keep = (torch.arange(VOCABULARY) < filters.top_k) & (before <= filters.top_p)
    keep &= weights >= filters.min_p * weights[0]
    weights, tokens = weights[keep].double(), tokens[keep]
    return int(tokens[torch.searchsorted(weights.cumsum(0), number * weights.sum(), right=True)])


@pytest.mark.parametrize(
    "filters",
    [Filters(40), Filters(700), Filters(ALL, top_p=0.9), Filters(ALL, top_p=0.999), Filters(ALL, min_p=0.02),
     Filters(ALL, min_p=1e-4), Filters(300, top_p=0.8, min_p=0.01)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("sharpness", [0.5, 4.0])
def test_a_draw_is_that_of_the_whole_sorted_vocabulary(filters, sharpness):
    """Looking at a few of the best tokens only draws what sorting all of them draws."""
    probabilities = distribution(3, sharpness)
    numbers = [uniform(1, position) for position in range(40)]
    assert [draw(probabilities, filters, n) for n in numbers] == [expected(probabilities, filters, n) for n in numbers]


@pytest.mark.parametrize("number", [0.0, 0.4, 1 - 2**-53])
def test_top_k_one_is_the_first_of_the_best(number):
    """top_k 1 is argmax, which takes the first of equals, whatever the number drawn."""
    probabilities = torch.tensor([0.1, 0.3, 0.3, 0.2, 0.1])
    assert draw(probabilities, Filters(1), number) == 1


@pytest.mark.parametrize("filters", [Filters(ALL), Filters(4), Filters(ALL, top_p=1.0, min_p=1e-9)], ids=str)
@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53])
def test_a_token_of_no_probability_never_comes(filters, number):
    """Neither end of the numbers falls on a token of probability 0."""
    assert draw(torch.tensor([0.0, 0.0, 0.6, 0.0, 0.4, 0.0]), filters, number) in (2, 4)


def test_draws_follow_the_probabilities():
    """Over many positions of one seed each token comes as often as its probability says, within five deviations."""
    probabilities, count = torch.tensor([0.5, 0.3, 0.15, 0.05]), 20000
    drawn = torch.tensor([draw(probabilities, Filters(ALL), uniform(11, position)) for position in range(count)])
    frequencies = drawn.bincount(minlength=4) / count
    assert ((frequencies - probabilities).abs() <= 5 * (probabilities * (1 - probabilities) / count).sqrt()).all()


@pytest.mark.parametrize("seed", [0, 42, -1, 2**63 - 1, -(2**63)])
def test_a_number_belongs_to_seed_and_position(seed):
    """The same seed and position give the same number in [0, 1); others give others."""
    numbers = [uniform(seed, position) for position in range(100)]
    assert numbers == [uniform(seed, position) for position in range(100)]
    assert len(set(numbers)) == 100
    assert all(0 <= number < 1 for number in numbers)
    assert not set(numbers) & {uniform(seed ^ 1, position) for position in range(100)}
