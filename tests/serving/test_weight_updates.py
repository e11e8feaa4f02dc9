"""Weights that change while a request is on its way."""

import time
from concurrent.futures import ThreadPoolExecutor

import random_models
import torch

BEFORE_SECONDS = 0.5


def test_the_next_token_is_of_the_new_weights(serve, tmp_path):
    """A request is paused, the weights are read anew, and from the first token on the answer is the new model's.

    With a final norm of zeros all logits are zero, and the best token is the first.
    """
    model = random_models.make("qwen3", tmp_path / "old")
    with torch.no_grad():
        model.model.norm.weight.zero_()
    model.save_pretrained(tmp_path / "new")
    with serve(tmp_path / "old", "float32", tmp_path, "--skip-tokenizer-init") as server, ThreadPoolExecutor(1) as pool:
        request = pool.submit(server.generate, random_models.prompt(9), 800)
        time.sleep(BEFORE_SECONDS)
        server.post("/pause_generation", {"mode": "in_place"})
        time.sleep(BEFORE_SECONDS)  # until the step on its way is through
        update = {"model_path": str(tmp_path / "new"), "flush_cache": False, "weight_version": "new"}
        assert server.post("/update_weights_from_disk", update).json()["success"]
        server.post("/continue_generation", {})
        answer = request.result()
    (new,) = [span["start"] for span in answer["meta_info"]["weight_versions"] if span["version"] == "new"]
    said = answer["output_ids"]
    assert 0 < new < len(said), "the request was not on its way"
    assert any(said[:new])
    assert not any(said[new:])
