"""A bad request is refused with a message, and the server goes on."""

import time

import pytest
import requests

ENDPOINTS = ("/generate", "/v1/completions", "/v1/chat/completions")


def body(server, endpoint: str, **params) -> dict:
    """A good request to `endpoint` with `params` among its sampling parameters."""
    if endpoint == "/generate":
        return {"text": "Hello", "sampling_params": {"max_new_tokens": 2} | params}
    question = {"messages": [{"role": "user", "content": "Hello"}]} if "chat" in endpoint else {"prompt": "Hello"}
    return {"model": server.model, "max_tokens": 2} | question | params


def assert_refused(answer: requests.Response, *words: str) -> None:
    """4xx, with a message that holds each of `words`."""
    assert 400 <= answer.status_code < 500, f"{answer.status_code}: {answer.text}"
    assert all(word in answer.text for word in words), answer.text
    assert "Traceback" not in answer.text


def assert_serving(server) -> None:
    """The server still answers."""
    assert len(server.generate("Hello", 2)["output_ids"]) == 2


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -7},
        {"min_p": -0.1},
        {"min_p": 2},
        {"frequency_penalty": 100},
        {"presence_penalty": -3},
        {"repetition_penalty": -1},
    ],
    ids=str,
)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_absurd_sampling_parameters(server, endpoint, params):
    """A sampling parameter outside its range is refused, named, on every endpoint."""
    assert_refused(server.post(endpoint, body(server, endpoint, **params)), *params)
    assert_serving(server)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_negative_number_of_tokens(server, endpoint):
    """A negative number of new tokens is refused."""
    name = "max_new_tokens" if endpoint == "/generate" else "max_tokens"
    assert_refused(server.post(endpoint, body(server, endpoint) | {"sampling_params": {name: -5}, name: -5}))
    assert_serving(server)


@pytest.mark.parametrize("value", ["hot", None, [1], {}], ids=str)
def test_a_parameter_of_the_wrong_type(server, value):
    """A temperature that is no number is refused."""
    if value is None:
        value = "null"
    assert_refused(server.post("/generate", body(server, "/generate", temperature=value)))
    assert_serving(server)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("data", [b"{", b"", b"[]", b'"text"', b"\xff\xfe", b'{"text": '], ids=repr)
def test_malformed_json(server, endpoint, data):
    """A body that is not a JSON object is refused."""
    headers = {"Content-Type": "application/json"}
    assert_refused(requests.post(server.url + endpoint, data=data, headers=headers, timeout=60))
    assert_serving(server)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_prompt_longer_than_the_context(server, endpoint):
    """A prompt longer than the context is refused, with the context's length in the message."""
    text = "word " * (server.context + 100)
    request = body(server, endpoint)
    request |= {"messages": [{"role": "user", "content": text}]} if "chat" in endpoint else {"text": text, "prompt": text}
    assert_refused(server.post(endpoint, request), str(server.context))
    assert_serving(server)


@pytest.mark.parametrize("ids", [[-1], [10**9], [10**30], ["a"], [1.5], []], ids=str)
def test_impossible_token_ids(server, ids):
    """Token ids outside the vocabulary, or none at all, are refused."""
    assert_refused(server.post("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 2}}))
    assert_serving(server)


def test_an_unknown_path(server):
    """A path that does not exist is 404."""
    assert server.post("/v1/nothing", {}).status_code == 404


def test_a_client_that_disconnects(server):
    """A client that goes away in mid-stream ends its request, and the server goes on."""
    params = {"temperature": 0, "max_new_tokens": 1000, "ignore_eos": True}
    request = {"text": "Once upon a time", "stream": True, "sampling_params": params}
    with server.post("/generate", request, stream=True) as answer:
        next(answer.iter_lines())
    began = time.monotonic()
    assert_serving(server)
    while running(server):
        assert time.monotonic() - began < 20, "the request of a client that is gone still runs"
        time.sleep(0.2)


def running(server) -> int:
    """How many requests the server is working on."""
    return sum(load["num_running_reqs"] for load in server.get("/v1/loads")["loads"])


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"stop_token_ids": [-3], "min_new_tokens": 2}, "stop_token_ids"),
        ({"stop_token_ids": [10**7], "min_new_tokens": 2}, "stop_token_ids"),
        ({"top_k": 2**62, "temperature": 1}, "top_k"),
        ({"stop_regex": "("}, "stop_regex"),
    ],
    ids=str,
)
def test_parameters_that_would_end_the_scheduler(server, params, named):
    """What SGLang would hand to the scheduler, which cannot compute with it, is refused by name."""
    assert_refused(server.post("/generate", body(server, "/generate", **params)), named)
    assert_serving(server)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"text": "Hello", "rid": ["a"]}, "rid"),
        ({"text": "Hello", "sampling_params": [{}]}, "sampling_params"),
        ({"text": "Hello", "return_logprob": True, "top_logprobs_num": [2]}, "top_logprobs_num"),
        ({"text": ["Hello", "Good"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["Hello", "Good"], "return_logprob": [True]}, "return_logprob"),
        ({"text": "Hello", "image_data": "picture.png"}, "image_data"),
    ],
    ids=str,
)
def test_fields_that_do_not_fit_the_prompts(server, fields, named):
    """As many values as prompts, and nothing that the model cannot read; else the field is named."""
    assert_refused(server.post("/generate", fields), named)
    assert_serving(server)


def test_lists_of_the_right_length(server):
    """A batch takes one value for each of its prompts."""
    fields = {"rid": ["one", "two"], "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}]}
    answers = server.post("/generate", {"text": ["Hello", "Good"]} | fields).json()
    assert [(answer["meta_info"]["id"], len(answer["output_ids"])) for answer in answers] == [("one", 1), ("two", 2)]


@pytest.mark.parametrize("verb", ["start", "stop", "dump"])
def test_experts_are_not_recorded(server, verb):
    """A recorder that was not set up is refused."""
    assert_refused(server.post(f"/{verb}_expert_distribution_record"), "experts")
    assert_serving(server)


def test_the_profiler_runs(server, tmp_path):
    """A profile of the host's side is taken, and the server goes on."""
    assert server.post("/start_profile", {"output_dir": str(tmp_path), "activities": ["CPU"]}).status_code == 200
    assert_serving(server)
    assert server.post("/stop_profile").status_code == 200
    assert_serving(server)
