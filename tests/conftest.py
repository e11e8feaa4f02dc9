"""What all tests share: options of the command line, and a real model's checkpoint."""

import os
import sys
from pathlib import Path

import pytest

# In pytest's own process torch is the reference, on the CPU. Where no TPU is presented torch_tpu's
# autoload would abort the process; children, which get their own environment, decide for themselves.
with pytest.MonkeyPatch.context() as environment:
    environment.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    import torch  # noqa: F401

from launch.checkpoint import smollm2_checkpoint

ROOT = Path(__file__).absolute().parent.parent


_status = pytest.StashKey[int]()


def pytest_sessionfinish(session, exitstatus):
    session.config.stash[_status] = exitstatus


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """End here: the plugins that tests have loaded into this process have threads and destructors that outlive Python."""
    sys.stdout.flush()
    sys.stderr.flush()
    if _status in config.stash:
        os._exit(int(config.stash[_status]))


def pytest_addoption(parser):
    group = parser.getgroup("tt-tpu-bridge")
    group.addoption("--server-url", help="run tests/serving against this live server instead of one of their own")
    group.addoption("--random-programs", type=int, default=30, help="random programs of collectives for each world size")
    group.addoption("--random-kills", type=int, default=4, help="ranks of meshes that are killed at random moments")
    group.addoption("--model", help="the live server's model: a folder or name that transformers can load")


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the project."""
    return ROOT


@pytest.fixture(scope="session")
def smollm2():
    """smollm2(dtype): folder of SmolLM2-135M-Instruct in "float32" or "bfloat16", made once a clone."""
    return lambda dtype: smollm2_checkpoint(ROOT / ".demo" / f"smollm2-135m-{dtype}", dtype)
