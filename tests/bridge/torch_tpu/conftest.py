"""A test that asks for `torch` runs in a process where torch sees the chip; the process is shared."""

import pytest
from chip_process import ChipProcess, environment


@pytest.fixture(scope="session")
def torch(tmp_path_factory):
    """torch, with an emulated chip as its device "tpu"."""
    process = ChipProcess(environment(tmp_path_factory.mktemp("caches")))
    yield process
    process.close()


@pytest.fixture(scope="session")
def small_torch(tmp_path_factory):
    """The same on a chip of 256 MiB."""
    process = ChipProcess(environment(tmp_path_factory.mktemp("caches"), TT_TPU_EMULATED_MEMORY="256M"))
    yield process
    process.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Send a test that has a chip process among its arguments there, with its other arguments."""
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    for name, process in arguments.items():
        if isinstance(process, ChipProcess):
            del arguments[name]
            process.call(pyfuncitem.path, pyfuncitem.originalname, arguments, name)
            return True
    return None
