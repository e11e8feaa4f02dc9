"""Model families: a small random model of each one's real classes says what Hugging Face's says."""

import pytest
import random_models

TOKENS = 24


@pytest.mark.parametrize("family", random_models.FAMILIES)
def test_greedy_tokens_equal_hugging_face(family, serve, tmp_path):
    """Four prompts at once in float32, the longer ones past 16 pages and past the window: all tokens are equal."""
    model = random_models.make(family, tmp_path / family)
    prompts = [random_models.prompt(length) for length in (20, random_models.WINDOW + 37, 520, 700)]
    with serve(tmp_path / family, "float32", tmp_path, "--page-size", "32", "--skip-tokenizer-init") as server:
        answers = server.generate_all(prompts, TOKENS)
    for prompt, answer in zip(prompts, answers, strict=True):
        said = answer["output_ids"]
        assert len(said) == TOKENS
        assert said == random_models.best_tokens(model, prompt, said), f"a prompt of {len(prompt)} tokens"
