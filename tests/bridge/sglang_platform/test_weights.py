"""Weights on their way to the chip; torch's meta device stands in for it."""

import pytest
import torch

from bridge.sglang_platform import weights


@pytest.fixture
def moved(monkeypatch):
    monkeypatch.setattr(weights, "DEVICE", "meta")
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False), torch.nn.BatchNorm1d(8))
    model[1].weight = model[0].weight
    model[0].weight.output_dim = 0
    weights.move_to_chip(model)
    return model


def test_all_parameters_and_buffers_move(moved):
    """Nothing of the model stays on the host."""
    assert {tensor.device.type for tensor in [*moved.parameters(), *moved.buffers()]} == {"meta"}


def test_what_is_shared_stays_shared(moved):
    """Tied weights are one tensor afterwards too."""
    assert moved[0].weight is moved[1].weight


def test_a_weight_keeps_what_is_known_of_it(moved):
    """SGLang's attributes of a parameter move with it, and it is a parameter still."""
    assert isinstance(moved[0].weight, torch.nn.Parameter)
    assert moved[0].weight.output_dim == 0


def test_the_model_is_built_on_the_host():
    """SGLang's loader is told that the device is the host, whatever the server's is."""
    assert weights.load_on_host(lambda **given: given, device="tpu", gpu_id=0) == {"device": "cpu", "gpu_id": 0}
