"""Sampling parameters mean what they say; Hugging Face's logits are the reference."""

from collections import Counter

import pytest
import torch

SAMPLES = 120


def sampled(server, prompt: list[int], samples: int, **sampling) -> Counter:
    """How often each token came first in `samples` answers of one token."""
    body = {"input_ids": [prompt] * samples, "sampling_params": {"max_new_tokens": 1, "ignore_eos": True} | sampling}
    answer = server.post("/generate", body)
    assert answer.status_code == 200, answer.text
    return Counter(one["output_ids"][0] for one in answer.json())


@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_the_tightest_filter_is_greedy(server, reference, sampling):
    """top_k 1, a vanishing top_p and min_p 1 leave the best token only, whatever the temperature."""
    prompt = reference.prompt(25)
    greedy = server.generate(prompt, 12)["output_ids"]
    assert server.generate(prompt, 12, temperature=1.5, **sampling)["output_ids"] == greedy


def allowed_by(probabilities: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """The tokens that the filters leave, by their definitions."""
    ordered, tokens = probabilities.sort(descending=True)
    keep = ordered.cumsum(0) - ordered < top_p
    keep &= ordered >= min_p * ordered[0]
    if top_k:
        keep[top_k:] = False
    return set(tokens[keep].tolist())


@pytest.mark.parametrize("filters", [{"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.2}], ids=str)
def test_filtered_tokens_never_come(server, reference, filters):
    """Only tokens that the filter leaves are drawn, and more than one of them."""
    prompt = reference.prompt(25, start=60)
    probabilities = reference.logits(prompt)[-1].softmax(0)
    # A hair more than the filter leaves: a token on its very edge may fall on either side.
    looser = {"top_k": {"top_k": 5}, "top_p": {"top_p": 0.52}, "min_p": {"min_p": 0.19}}[next(iter(filters))]
    drawn = sampled(server, prompt, 40, temperature=1.0, **filters)
    assert len(drawn) > 1
    assert set(drawn) <= allowed_by(probabilities, **looser)


@pytest.mark.parametrize("temperature", [0.7])
def test_draws_follow_the_distribution(server, reference, temperature):
    """Each likely token is drawn as often as its probability says, within five standard deviations."""
    prompt = reference.prompt(25, start=60)
    probabilities = (reference.logits(prompt)[-1] / temperature).softmax(0)
    drawn = sampled(server, prompt, SAMPLES, temperature=temperature)
    for probability, token in zip(*(part.tolist() for part in probabilities.topk(5))):
        expected, deviation = SAMPLES * probability, (SAMPLES * probability * (1 - probability)) ** 0.5
        assert abs(drawn[token] - expected) <= 5 * deviation + 1


def test_a_seed_repeats_its_draws(server, reference):
    """The same seed gives the same tokens again, alone or beside others; another seed gives others."""
    prompt = reference.prompt(25)
    first = server.generate(prompt, 16, temperature=1.0, sampling_seed=7)["output_ids"]
    assert server.generate(prompt, 16, temperature=1.0, sampling_seed=7)["output_ids"] == first
    beside = server.generate_all([prompt, prompt], 16, temperature=1.0, sampling_seed=7)
    assert [answer["output_ids"] for answer in beside] == [first, first]
    assert server.generate(prompt, 16, temperature=1.0, sampling_seed=8)["output_ids"] != first


def penalized(logits, said, frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0):
    """Logits after the penalties, all of which SGLang counts over the answer alone."""
    counts = torch.bincount(torch.tensor(said, dtype=torch.long), minlength=len(logits))
    logits = logits - frequency_penalty * counts - presence_penalty * (counts > 0)
    scaled = torch.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty)
    return torch.where(counts > 0, scaled, logits)


@pytest.mark.parametrize(
    "penalty",
    [{"frequency_penalty": 1.5}, {"presence_penalty": 1.5}, {"repetition_penalty": 1.4}],
    ids=str,
)
def test_penalties(server, reference, penalty):
    """Greedy decoding under a penalty takes the best of the penalized logits at every step."""
    prompt = reference.prompt(5) * 5  # greedy decoding goes on repeating it
    said = server.generate(prompt, 24, **penalty)["output_ids"]
    assert said != server.generate(prompt, 24)["output_ids"]
    rows = reference.logits(prompt + said)[len(prompt) - 1 : -1]
    tolerance = 1e-3 if server.dtype == "float32" else 0.3
    for step, (row, token) in enumerate(zip(rows, said)):
        after = penalized(row, said[:step], **penalty)
        assert after.max().item() - after[token].item() <= tolerance, f"step {step}"
