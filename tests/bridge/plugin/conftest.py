"""The built plugin, driven through pypjrt: no torch, no JAX."""

import pypjrt
import pytest

from bridge.backend import PLUGIN


@pytest.fixture(scope="session")
def plugin() -> pypjrt.Plugin:
    loaded = pypjrt.Plugin(PLUGIN)
    loaded.initialize()
    return loaded


class _Kept(pypjrt.Client):
    """Lives as long as the process: closing it beside torch's own libraries ends the process."""

    def __del__(self) -> None:
        pass


@pytest.fixture(scope="session")
def client(plugin):
    """One client for all tests; each gives back the memory that it takes."""
    return _Kept.create(plugin, allow_multiple=True)  # other tests have one of the inner plugin


@pytest.fixture
def device(client):
    with client.device() as device:
        yield device
