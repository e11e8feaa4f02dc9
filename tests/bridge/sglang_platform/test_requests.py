"""Requests that would end the server."""

from types import SimpleNamespace

import pytest

from bridge.sglang_platform.requests import refuse

MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))


def request(**fields):
    return SimpleNamespace(**{"sampling_params": {}, "top_logprobs_num": 0} | fields)


@pytest.mark.parametrize(
    "fields, ids, named",
    [
        ({}, [], "empty"),
        ({}, None, "empty"),
        ({}, [5, 100], "100"),
        ({}, [5, -1], "-1"),
        ({"sampling_params": {"n": 0}}, [5], "n must be at least 1"),
        ({"top_logprobs_num": 101}, [5], "top_logprobs_num"),
        ({"top_logprobs_num": -1}, [5], "top_logprobs_num"),
        ({"input_embeds": [[0.5]]}, None, "input_embeds"),
        ({"return_sampling_mask": True}, [5], "return_sampling_mask"),
        ({"positional_embed_overrides": [1]}, [5], "positional_embed_overrides"),
        ({"sampling_params": {"stop_token_ids": [7, -3]}}, [5], "stop_token_ids holds -3"),
        ({"sampling_params": {"stop_token_ids": [100]}}, [5], "stop_token_ids holds 100"),
        ({"sampling_params": {"stop_regex": "("}}, [5], "stop_regex"),
        ({"sampling_params": {"stop_regex": ["a", "["]}}, [5], "stop_regex"),
        ({"sampling_params": {"top_k": 2**31}}, [5], "top_k must be at most"),
    ],
    ids=str,
)
def test_a_request_that_would_end_the_server_is_refused(fields, ids, named):
    """The client is told what is wrong with its request: SGLang makes HTTP 400 of a ValueError."""
    with pytest.raises(ValueError, match=named):
        refuse(MANAGER, request(**fields), ids)


@pytest.mark.parametrize("fields", [{}, {"sampling_params": {"n": 3, "top_k": -1, "stop_token_ids": [0, 99]}}, {"top_logprobs_num": 100}], ids=str)
def test_a_sound_request_passes(fields):
    """Token ids of the vocabulary, its ends included, with values within their bounds."""
    refuse(MANAGER, request(**fields), [0, 99])
