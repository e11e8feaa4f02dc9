"""Whether a model fits the chip."""

import pytest
import torch

from bridge.errors import BackendError
from bridge.sglang_platform import memory

LAYER = torch.nn.Linear(512, 1024, bias=False)  # 2 MiB


@pytest.mark.parametrize("free", [2 << 20, 4 << 20])
def test_a_model_that_fits(monkeypatch, free):
    """Weights may take all of the memory that is free; one that two layers share counts once."""
    monkeypatch.setattr(memory, "memory_info", lambda: (free, 8 << 20))
    memory.require_weights(torch.nn.Sequential(LAYER, LAYER))


def test_a_model_that_does_not_fit(monkeypatch):
    """The error says how much is needed, how much is there, and what to do."""
    monkeypatch.setattr(memory, "memory_info", lambda: ((2 << 20) - 1, 8 << 20))
    with pytest.raises(BackendError, match=r"need 2.0 MiB on each chip, where 2.0 MiB of 8.0 MiB are free: .*--tp-size"):
        memory.require_weights(LAYER)
