"""The built plugin, driven through pypjrt: no torch, no JAX."""

import pypjrt
import pytest

from bridge.backend import PLUGIN


@pytest.fixture(scope="session")
def plugin() -> pypjrt.Plugin:
    loaded = pypjrt.Plugin(PLUGIN)
    loaded.initialize()
    return loaded


@pytest.fixture(scope="session")
def client(plugin):
    """One client for all tests; each gives back the memory that it takes."""
    with pypjrt.Client.create(plugin, allow_multiple=True) as client:  # other tests have one of the inner plugin
        yield client


@pytest.fixture
def device(client):
    with client.device() as device:
        yield device
