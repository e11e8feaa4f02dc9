"""A serving process is started, waited for and stopped."""

import subprocess
import sys
import time

import psutil
import pytest

from bridge import ports
from bridge.errors import LaunchError
from launch import server

# A server that answers /health with 200, and ends on SIGTERM with the status that it was given.
HEALTHY = """
import http.server, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[2])))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
# One that holds on to life, with a child that does too.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def address():
    return server.Address("127.0.0.1", ports.free_port())


@pytest.mark.parametrize("status", [0, 3])
def test_ready_and_stopped(address, status):
    """A server that answers is ready, its port is taken, and stop gives its exit status."""
    process = server.start([sys.executable, "-c", HEALTHY, str(address.port), str(status)])
    try:
        assert server.wait_ready(process, address, 30) < 30
        assert not address.free()
    finally:
        assert server.stop(process) == status


def test_a_server_that_ends_early(address):
    """A server that ends before it answers is an error with its exit status."""
    process = server.start([sys.executable, "-c", "raise SystemExit(7)"])
    with pytest.raises(LaunchError, match="exit status 7"):
        server.wait_ready(process, address, 30)


def test_a_server_that_never_answers(address):
    """A server that does not answer in time is an error that names the address."""
    process = server.start([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with pytest.raises(LaunchError, match=str(address.port)):
            server.wait_ready(process, address, 0.6)
    finally:
        server.stop(process)


def test_another_program_that_answers_is_not_the_server(address):
    """Two that are started at once find the port free; what the other one answers does not make this one ready."""
    other = server.start([sys.executable, "-c", HEALTHY, str(address.port), "0"])
    process = server.start([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        server.wait_ready(other, address, 30)
        with pytest.raises(LaunchError, match=f"port {address.port} is in use by another program"):
            server.wait_ready(process, address, 30)
    finally:
        server.stop(process)
        server.stop(other)


def test_a_stubborn_server_is_killed_with_its_children():
    """A server that ignores SIGTERM is killed after the given time, and so is what it started."""
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True, start_new_session=True)
    child = psutil.Process(int(process.stdout.readline()))
    began = time.monotonic()
    assert server.stop(process, seconds=0.5) == -9
    assert time.monotonic() - began < 5
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - began < 5
        time.sleep(0.05)


def test_environment(monkeypatch):
    """The server finds chips presented as TPUs and SGLang's platform chosen, and the rest of the environment as it is."""
    monkeypatch.setenv("SOMETHING", "else")
    environment = server.environment()
    assert environment["LIBTT_TPU_COMPAT"] == "1"
    assert environment["SGLANG_PLATFORM"] == "tpu_oot"
    assert environment["SOMETHING"] == "else"


@pytest.mark.parametrize(("host", "url"), [("127.0.0.1", "http://127.0.0.1:80"), ("::1", "http://[::1]:80")])
def test_address_as_url(host, url):
    """An address is written as a URL, IPv6 in brackets."""
    assert str(server.Address(host, 80)) == url


def test_a_server_ends_with_the_process_that_started_it(address):
    """When its starter is killed, a server is told to end."""
    arguments = [sys.executable, "-c", HEALTHY, str(address.port), "0"]
    source = f"import time; from launch import server; server.start({arguments!r}); time.sleep(600)"
    starter = subprocess.Popen([sys.executable, "-c", source])
    try:
        while not address.answers():
            assert starter.poll() is None
            time.sleep(0.1)
    finally:
        starter.kill()
    starter.wait()
    began = time.monotonic()
    while address.answers():
        assert time.monotonic() - began < 10
        time.sleep(0.1)
