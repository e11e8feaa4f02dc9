"""Weights that change while a request is on its way."""

import json
import time

import random_models
import torch


def test_the_next_token_is_of_the_new_weights(serve, tmp_path):
    """A request is paused, the weights are read anew, and from the first token on the answer is the new model's.

    With a final norm of zeros all logits are zero, and the best token is the first.
    """
    model = random_models.make("qwen3", tmp_path / "old")
    with torch.no_grad():
        model.model.norm.weight.zero_()
    model.save_pretrained(tmp_path / "new")
    body = {"input_ids": random_models.prompt(9), "stream": True}
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
    with serve(tmp_path / "old", "float32", tmp_path, "--skip-tokenizer-init") as server:
        chunks = (line for line in server.post("/generate", body, stream=True).iter_lines() if line.startswith(b"data: {"))
        next(chunks)
        server.post("/pause_generation", {"mode": "in_place"})
        time.sleep(0.5)  # until the step on its way is through
        update = {"model_path": str(tmp_path / "new"), "flush_cache": False, "weight_version": "new"}
        assert server.post("/update_weights_from_disk", update).json()["success"]
        server.post("/continue_generation", {})
        answer = json.loads([*chunks][-1].removeprefix(b"data: "))
    (new,) = [span["start"] for span in answer["meta_info"]["weight_versions"] if span["version"] == "new"]
    said = answer["output_ids"]
    assert 0 < new < len(said), "the request was not on its way"
    assert any(said[:new])
    assert not any(said[new:])
