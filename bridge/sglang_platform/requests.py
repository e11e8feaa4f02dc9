"""Requests that SGLang would answer with an internal error, or let through to the scheduler, where they end the server.

They are refused where SGLang refuses the others, so the client reads HTTP 400
and the reason, and the server goes on.
"""

import re
from typing import Any

_UNSUPPORTED = ("return_sampling_mask", "positional_embed_overrides")
_MEDIA = ("image_data", "video_data", "audio_data")
_ONE_EACH = ("rid", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num")
_MOST_TOP_K = 2**31 - 1


def refuse_uneven(obj: Any) -> None:
    """BEFORE GenerateReqInput._handle_parallel_sampling: one value each for one prompt, or a list as long as the batch."""
    for name in _ONE_EACH:
        values = getattr(obj, name)
        if not isinstance(values, list):
            continue
        if obj.is_single:
            raise ValueError(f"{name} is a list, and there is one prompt: send one value.")
        if len(values) != obj.batch_size:
            raise ValueError(f"{name} has {len(values)} values for {obj.batch_size} prompts.")


def refuse(manager: Any, obj: Any, input_ids: list[int] | None) -> None:
    """BEFORE TokenizerManager._validate_one_request; raises ValueError."""
    if getattr(obj, "input_embeds", None) is not None:
        raise ValueError("input_embeds is not supported on this chip: send text or input_ids")
    for name in _UNSUPPORTED:
        if getattr(obj, name, None):
            raise ValueError(f"{name} is not supported on this chip.")
    media = next((name for name in _MEDIA if getattr(obj, name, None)), None)
    if media and not manager.model_config.is_multimodal:
        raise ValueError(f"{media} cannot be read: the model takes text alone.")
    if not input_ids:
        raise ValueError("The prompt is empty: it must have at least one token.")
    vocabulary = manager.model_config.vocab_size
    outside = next((token for token in input_ids if not 0 <= token < vocabulary), None)
    if outside is not None:
        raise ValueError(f"input_ids holds {outside}; token ids go from 0 to {vocabulary - 1}.")
    sampling = obj.sampling_params or {}
    stops = next((token for token in sampling.get("stop_token_ids") or () if not 0 <= token < vocabulary), None)
    if stops is not None:
        raise ValueError(f"stop_token_ids holds {stops}; token ids go from 0 to {vocabulary - 1}.")
    if (sampling.get("top_k") or 0) > _MOST_TOP_K:
        raise ValueError(f"top_k must be at most {_MOST_TOP_K}, got {sampling['top_k']}: -1 means all tokens.")
    _check_patterns(sampling.get("stop_regex"))
    samples = sampling.get("n")
    if samples is not None and samples < 1:
        raise ValueError(f"n must be at least 1, got {samples}.")
    wanted = getattr(obj, "top_logprobs_num", None) or 0
    if not 0 <= wanted <= vocabulary:
        raise ValueError(f"top_logprobs_num must be in [0, {vocabulary}], got {wanted}.")


def _check_patterns(patterns: str | list[str] | None) -> None:
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(f"stop_regex {pattern!r} is no regular expression: {error}.") from None


def refuse_expert_records(*_arguments: Any) -> None:
    """BEFORE TokenizerManager's …_expert_distribution_record: without a recorder the scheduler would end."""
    from fastapi import HTTPException

    raise HTTPException(400, "The distribution of experts is not recorded on this chip.")


def want_json_objects(http_server: Any) -> None:
    """When SGLang's HTTP server has been imported: a body that is no JSON object is HTTP 400, as malformed JSON is."""
    from fastapi import HTTPException

    parse = http_server.ORJSONRequest.json

    async def json(request: Any) -> dict:
        body = await parse(request)
        if not isinstance(body, dict):
            raise HTTPException(400, "The body must be a JSON object.")
        return body

    http_server.ORJSONRequest.json = json
