"""The three endpoints answer in their own forms, whole and streamed."""

import json

import pytest

PROMPT = "The capital of France is"
CHAT = [{"role": "user", "content": "Name one colour."}]


def events(answer) -> list[dict]:
    """The JSON of each event of a stream, which must end with [DONE]."""
    lines = [line[6:] for line in answer.iter_lines(decode_unicode=True) if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_generate(server):
    """/generate continues a text and reports how many tokens it read and wrote, and why it ended."""
    answer = server.generate(PROMPT, 8)
    assert answer["text"].strip()
    assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]) == 8
    assert answer["meta_info"]["prompt_tokens"] > 0
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


def test_generate_several(server):
    """/generate answers a list of prompts with a list in the same order."""
    prompts = [PROMPT, "One two three four", "def add(a, b):"]
    body = {"text": prompts, "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}}
    answers = server.post("/generate", body).json()
    assert [answer["text"] for answer in answers] == [server.generate(prompt, 6)["text"] for prompt in prompts]


def test_generate_streams(server):
    """The last event of a /generate stream carries the text of the whole answer, and each one a longer part of it."""
    body = {"text": PROMPT, "stream": True, "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}}
    parts = [event["text"] for event in events(server.post("/generate", body, stream=True))]
    assert len(parts) > 1
    assert all(later.startswith(earlier) for earlier, later in zip(parts, parts[1:]))
    assert parts[-1] == server.generate(PROMPT, 12)["text"]


def test_stop_string_ends_an_answer(server):
    """An answer ends before the stop string."""
    whole = server.generate(PROMPT, 24)["text"]
    word = whole.split()[2]
    answer = server.generate(PROMPT, 24, stop=[word])
    assert answer["text"] == whole[: whole.index(word)]
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_logprobs(server, reference):
    """The log probabilities that /generate returns are Hugging Face's."""
    prompt = reference.prompt(30)
    body = {"input_ids": prompt, "return_logprob": True, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    said = server.post("/generate", body).json()["meta_info"]["output_token_logprobs"]
    tokens = [token for _, token, _ in said]
    rows = reference.logits(prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
    expected = [row[token].item() for row, token in zip(rows, tokens)]
    tolerance = 1e-3 if server.dtype == "float32" else 0.15
    assert [value for value, _, _ in said] == pytest.approx(expected, abs=tolerance)


def test_completions(server):
    """/v1/completions gives the same greedy text as /generate."""
    body = {"model": server.model, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    answer = server.post("/v1/completions", body).json()
    assert answer["choices"][0]["text"] == server.generate(PROMPT, 8)["text"]
    assert answer["usage"]["completion_tokens"] == 8


def test_completions_stream(server):
    """The pieces of a /v1/completions stream add up to the whole text."""
    body = {"model": server.model, "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    pieces = events(server.post("/v1/completions", body | {"stream": True}, stream=True))
    text = "".join(piece["choices"][0]["text"] for piece in pieces if piece["choices"])
    assert text == server.generate(PROMPT, 12)["text"]


def test_chat(server, reference):
    """/v1/chat/completions answers what /generate says to the model's own chat template."""
    body = {"model": server.model, "messages": CHAT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    prompt = reference.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert message["role"] == "assistant"
    assert message["content"] == server.generate(prompt, 12)["text"]


def test_chat_stream(server):
    """The pieces of a chat stream add up to the whole message."""
    body = {"model": server.model, "messages": CHAT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    whole = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    pieces = events(server.post("/v1/chat/completions", body | {"stream": True}, stream=True))
    assert "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces if piece["choices"]) == whole
