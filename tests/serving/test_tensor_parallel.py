"""A server on several chips says what Hugging Face says, and what it says on one."""

import random_models

import pytest

TOKENS = 24


@pytest.mark.parametrize("chips", [2, 4])
def test_tensor_parallel(chips, serve, tmp_path):
    """Greedy tokens equal Hugging Face's, drawn ones are the same on all ranks, and steady decode compiles nothing.

    With 2 key/value heads: at 4 chips each is on two of them.
    """
    model = random_models.make("qwen3", tmp_path / "model")
    prompts = [random_models.prompt(length) for length in (1, 20, 133, 300)]
    options = ("--tp-size", str(chips), "--page-size", "32", "--skip-tokenizer-init")
    with serve(tmp_path / "model", "float32", tmp_path, *options) as server:
        answers = server.generate_all(prompts, TOKENS)
        before = server.compile_requests()
        drawn = [server.generate(prompts[1], TOKENS, temperature=1.0, sampling_seed=7)["output_ids"] for _ in range(2)]
        # Ranks that drew different tokens would not come to the same collectives any more.
        server.generate_all(prompts, TOKENS, temperature=1.0)
        again = server.generate_all(prompts, TOKENS)
        assert server.compile_requests() == before
    for prompt, answer in zip(prompts, answers, strict=True):
        said = answer["output_ids"]
        assert said == random_models.best_tokens(model, prompt, said), f"a prompt of {len(prompt)} tokens"
    assert drawn[0] == drawn[1]
    assert [answer["output_ids"] for answer in again] == [answer["output_ids"] for answer in answers]
