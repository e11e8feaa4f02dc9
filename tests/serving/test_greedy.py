"""Greedy decoding through the server says what Hugging Face says on the CPU."""

import pytest

NEAR_TIE = 0.05
TOKENS = 64
LENGTHS = (1, 2, 3, 7, 13, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 256, 300, 383, 450)


def first_departure(reference, prompt: list[int], said: list[int]) -> tuple[int, float] | None:
    """Where `said` leaves what Hugging Face generates, and the gap between the two best logits there.

    The smaller of two gaps: of the logits that Hugging Face chose by, and of the
    same weights' in float32. bfloat16 logits lie 0.125 apart, so that Hugging
    Face's own two ways, with and without its cache, part at gaps of one step.
    """
    path, gaps = reference.greedy(prompt, len(said))
    for step, (token, other) in enumerate(zip(path, said)):
        if token != other:
            best, second = reference.exact_logits(prompt + said[:step])[-1].topk(2).values.tolist()
            return step, min(gaps[step], best - second)
    return None


def test_greedy_tokens_equal_hugging_face(server, reference):
    """20 prompts of 1 to 450 tokens, 64 greedy tokens each: all tokens equal in float32, in bfloat16 up to a near-tie."""
    prompts = [reference.prompt(length, start=17 * i) for i, length in enumerate(LENGTHS)]
    departures = {}
    for prompt, answer in zip(prompts, server.generate_all(prompts, TOKENS)):
        assert len(answer["output_ids"]) == TOKENS
        departure = first_departure(reference, prompt, answer["output_ids"])
        if departure and (server.dtype == "float32" or departure[1] >= NEAR_TIE):
            departures[len(prompt)] = departure
    assert not departures, f"prompt length: (step, gap of Hugging Face's two best logits) {departures}"


def test_four_at_once_equal_alone(server, reference):
    """Four requests at once say what each of them says alone."""
    prompts = [reference.prompt(length, start=300) for length in (5, 40, 64, 190)]
    alone = [server.generate(prompt, 32)["text"] for prompt in prompts]
    assert [answer["text"] for answer in server.generate_all(prompts, 32)] == alone


def test_text_is_the_decoded_tokens(server, reference):
    """The text of an answer is what the model's tokenizer makes of its tokens."""
    answer = server.generate(reference.prompt(20), 24)
    assert answer["text"] == reference.tokenizer.decode(answer["output_ids"], skip_special_tokens=True)


def test_a_shared_prefix_changes_nothing(server, reference):
    """A prompt whose beginning another request left in the radix cache says what it says with the cache flushed."""
    prefix = reference.prompt(192, start=700)
    prompts = [prefix + reference.prompt(9, start=start) for start in (10, 40)]
    server.post("/flush_cache")
    cold = [server.generate(prompts[1], 24), server.generate(prompts[0], 24)]
    warm = server.generate(prompts[1], 24)
    assert warm["meta_info"]["cached_tokens"] > cold[0]["meta_info"]["cached_tokens"]
    assert warm["output_ids"] == cold[0]["output_ids"]


@pytest.mark.parametrize("length", [64, 128, 191])
def test_chunks_of_a_prompt_change_nothing(server, reference, length):
    """A prompt that is prefilled in chunks has the next token that Hugging Face gives it."""
    prompt = reference.prompt(length, start=500)
    row = reference.logits(prompt)[-1]
    token = server.generate(prompt, 1)["output_ids"][0]
    assert row.max().item() - row[token].item() < (1e-3 if server.dtype == "float32" else NEAR_TIE)
