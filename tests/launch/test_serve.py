"""tt-tpu serve: its command line, and what it refuses before anything starts."""

import socket
import subprocess
import sys

import pytest

from bridge.errors import LaunchError
from launch import serve


def value_of(options: list[str], name: str) -> list[str]:
    """The words after each `name` up to the next option."""
    words = options[options.index(name) + 1 :]
    return words[: next((i for i, word in enumerate(words) if word.startswith("--")), len(words))]


def test_defaults():
    """Without options of the user, buckets of 1 and 4 requests and chunks of 64 tokens are compiled."""
    options = serve.options(None, [])
    assert value_of(options, "--tpu-compile-bs") == ["1", "4"]
    assert value_of(options, "--chunked-prefill-size") == ["64"]
    assert value_of(options, "--context-length") == ["2048"]


@pytest.mark.parametrize("given", [["--dtype", "float32"], ["--dtype=float32"]])
def test_the_user_wins(given):
    """An option of the user's takes the place of a default, in both spellings."""
    options = serve.options(None, given)
    assert options[-len(given) :] == given
    assert "bfloat16" not in options


@pytest.mark.parametrize(
    ("chips", "given", "size"),
    [
        (None, [], 1),
        (4, [], 4),
        (4, ["--dp-size", "2"], 2),
        (4, ["--data-parallel-size=4"], 1),
        (None, ["--dp-size", "2", "--tp-size", "2"], 2),
        (4, ["--dp-size", "2", "--tp-size", "2"], 2),
    ],
)
def test_replicas_share_the_chips(chips, given, size):
    """--chips counts those of all replicas together, and each is divided over its part."""
    assert serve.chips_a_replica(chips, given) == size


@pytest.mark.parametrize(("chips", "given"), [(3, ["--dp-size", "2"]), (4, ["--tp-size", "2"]), (0, [])])
def test_chips_that_replicas_cannot_share_are_refused(chips, given):
    """A chip too many is not left idle without a word."""
    with pytest.raises(LaunchError, match=f"--chips {chips}"):
        serve.chips_a_replica(chips, given)


def test_a_short_context_is_respected():
    """The context is no longer than the model's."""
    assert value_of(serve.options(512, []), "--context-length") == ["512"]
    assert value_of(serve.options(40960, []), "--context-length") == ["2048"]


def run_serve(*arguments) -> subprocess.CompletedProcess:
    """`tt-tpu serve` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "launch.cli", "serve", *arguments], capture_output=True, text=True, timeout=120
    )


def assert_refused(done: subprocess.CompletedProcess, status: int, *words: str) -> None:
    """The exit status, each of `words` in the message, and no traceback."""
    assert done.returncode == status, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr


def test_no_model():
    """A model that is not there is refused in one message."""
    assert_refused(run_serve("/no/such/model"), 1, "/no/such/model", "config.json")


def test_a_port_in_use(smollm2):
    """A port that somebody listens on is named."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_refused(run_serve(smollm2("bfloat16"), "--port", port), 1, port, "in use")


def test_a_foreign_address(smollm2):
    """An address that is not this machine's is named."""
    assert_refused(run_serve(smollm2("bfloat16"), "--host", "192.0.2.1"), 1, "192.0.2.1", "cannot listen")


@pytest.mark.parametrize("port", ["0", "-1", "70000", "http"])
def test_an_impossible_port(port):
    """A port that cannot be is wrong usage."""
    assert_refused(run_serve("model", f"--port={port}"), 2, port, "not a port")


def test_an_unknown_backend(smollm2, monkeypatch):
    """A backend that cannot be used is said before the server starts."""
    monkeypatch.setenv("TT_TPU_BACKEND", "gpu")
    assert_refused(run_serve(smollm2("bfloat16")), 1, "TT_TPU_BACKEND='gpu'")
