"""A server in steady state: what it compiles, what it holds in memory, and shapes that nobody announced."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

GIB = 1 << 30


@pytest.mark.needs_process
def test_no_program_is_compiled_in_steady_decode(server, reference):
    """Decoding at the announced batch sizes compiles nothing, however long the sequences grow.

    A live server's compile service answers only to its own user on its own host.
    """
    prompts = [reference.prompt(length, start=900) for length in (30, 64, 100, 200)]
    server.generate_all(prompts, 8)
    before = server.compile_requests()
    server.generate(prompts[0], 150)
    server.generate_all(prompts, 150)
    assert server.compile_requests() == before


@pytest.mark.parametrize("at_once", [2, 3, 5, 9])
def test_a_batch_of_any_size_is_served(server, reference, at_once):
    """A number of requests that no program was compiled for is served, each as if it were alone."""
    prompts = [reference.prompt(11 + i, start=40 * i) for i in range(at_once)]
    alone = [server.generate(prompt, 6)["output_ids"] for prompt in prompts]
    body = {"input_ids": prompts, "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}}
    assert [answer["output_ids"] for answer in server.post("/generate", body).json()] == alone


def test_requests_that_come_and_go(server, reference):
    """Each is served as if it were alone, whoever begins or ends meanwhile."""
    chosen = random.Random(0)
    requests = [(reference.prompt(chosen.randint(1, 90), start=30 * i), chosen.randint(1, 12)) for i in range(24)]
    alone = [server.generate(*request)["output_ids"] for request in requests]

    def later(request: tuple[list[int], int]) -> list[int]:
        time.sleep(chosen.random() / 4)
        return server.generate(*request)["output_ids"]

    with ThreadPoolExecutor(7) as pool:
        assert list(pool.map(later, requests)) == alone


@pytest.mark.needs_process
def test_memory(server, reference):
    """At its peak the whole process tree holds at most weights, KV pool and 3.5 GiB.

    A live server's processes cannot be seen from here.
    """
    server.generate_all([reference.prompt(400, start=100 * i) for i in range(4)], 16)
    weights = sum(file.stat().st_size for file in Path(server.model).glob("*.safetensors"))
    config = json.loads((Path(server.model) / "config.json").read_text())
    width = 2 * config["num_key_value_heads"] * config["hidden_size"] // config["num_attention_heads"]
    pool = server.info()["max_total_num_tokens"] * config["num_hidden_layers"] * width
    pool *= 4 if server.dtype == "float32" else 2
    assert server.peak_memory <= weights + pool + 3.5 * GIB
