"""A server with two replicas of a model, each on chips of its own, says what Hugging Face says."""

import random_models

import pytest

TOKENS = 16


@pytest.mark.parametrize("chips", [2, 4])
def test_data_parallel(chips, serve, tmp_path):
    """Each replica says what Hugging Face says, both take part in a crowd, and steady decode compiles nothing.

    At 4 chips each replica is a mesh of two; its collectives never meet the other's.
    """
    model = random_models.make("qwen3", tmp_path / "model")
    prompts = [random_models.prompt(length) for length in (1, 20, 133, 300)]
    options = ("--chips", str(chips), "--dp-size", "2", "--page-size", "32", "--skip-tokenizer-init")
    with serve(tmp_path / "model", "float32", tmp_path, *options) as server:
        alone = [server.generate(prompts[1], TOKENS, replica=replica) for replica in (0, 1)]
        answers = server.generate_all(prompts * 2, TOKENS)
        before = server.compile_requests()
        server.generate_all(prompts * 2, TOKENS)
        assert server.compile_requests() == before
        schedulers = [p for p in server.processes() if p.name().startswith("sglang::schedul")]
    assert len(schedulers) == chips
    assert [answer["meta_info"]["dp_rank"] for answer in alone] == [0, 1]
    assert {answer["meta_info"]["dp_rank"] for answer in answers} == {0, 1}
    for prompt, answer in zip([prompts[1]] * 2 + prompts * 2, alone + answers, strict=True):
        said = answer["output_ids"]
        assert said == random_models.best_tokens(model, prompt, said), f"a prompt of {len(prompt)} tokens"
