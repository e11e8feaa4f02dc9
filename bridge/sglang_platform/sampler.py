"""SGLang's sampler with the drawing done by draws.py.

In SGLang a seed counts only under --enable-deterministic-inference, cannot be
had together with min_p, and compiles a kernel at the first draw. Here each
request has a seed, its own or a random one.
"""

import functools
import random
from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler, register_sampler_backend

from bridge.sglang_platform.draws import Filters, draw, uniform
from bridge.sglang_platform.flags import SAMPLING_BACKEND


@functools.cache
def _seeds() -> random.Random:
    """Seeds for requests without one: SGLang gives all ranks the same seed, and they must draw the same tokens."""
    return random.Random(torch.initial_seed())


def seed_requests(info: Any, _class: type, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER SamplingBatchInfo.from_schedule_batch: a seed for each request of the batch."""
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    info.sampling_seed = torch.tensor(
        [_seeds().getrandbits(63) if seed is None else seed for seed in seeds], dtype=torch.int64
    )


class HostSampler(Sampler):
    """Draws on the host, row by row; logits, penalties and log-probabilities are SGLang's."""

    def _sample_from_probs(
        self, probs: torch.Tensor, sampling_info: Any, positions: torch.Tensor, simple_sampling_case: bool
    ) -> tuple[torch.Tensor, None]:
        rows = zip(
            probs,
            sampling_info.top_ks.tolist(),
            sampling_info.top_ps.tolist(),
            sampling_info.min_ps.tolist(),
            sampling_info.sampling_seed.tolist(),
            positions.tolist(),
            strict=True,
        )
        tokens = [
            draw(row, Filters(top_k, top_p, min_p), uniform(seed, position))
            for row, top_k, top_p, min_p, seed, position in rows
        ]
        return torch.tensor(tokens, dtype=torch.int32), None


register_sampler_backend(SAMPLING_BACKEND, HostSampler)
