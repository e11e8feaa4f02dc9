"""A compile service of its own for each test that asks for one."""

import pytest
from service_client import ServiceClient


@pytest.fixture
def service(tmp_path):
    """A service with two workers at most."""
    client = ServiceClient(tmp_path)
    yield client
    client.close()
