"""The server under test, and Hugging Face's answer to the same question.

Without options, two servers are started one after the other through
`tt-tpu serve`, SmolLM2-135M in float32 and in bfloat16. With --server-url the
same tests talk to a live server; those that need its process are left out.
"""

import dataclasses
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.server import Address, free_port, stop, wait_ready

DTYPES = ("float32", "bfloat16")
READY_SECONDS = 600
EXTRA_OPTIONS = ()


@dataclasses.dataclass
class Server:
    """A server under test.

    Attributes:
        url: where it answers.
        model: folder or name of its model.
        dtype: "float32" or "bfloat16".
        context: its context length in tokens.
        process: what `tt-tpu serve` started; None for a live server.
        log: its output; None for a live server.
    """

    url: str
    model: str
    dtype: str
    context: int
    process: subprocess.Popen | None = None
    log: Path | None = None

    def post(self, path: str, body=None, **options) -> requests.Response:
        """POST `body` as JSON."""
        return requests.post(self.url + path, json=body, timeout=300, **options)

    def generate(self, prompt: list[int] | str, tokens: int = 16, **sampling) -> dict:
        """/generate's answer to token ids or a text; greedy unless told otherwise, end of text ignored."""
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True} | sampling
        question = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        answer = self.post("/generate", question | {"sampling_params": params})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def generate_all(self, prompts: list, tokens: int = 16, at_once: int = 4, **sampling) -> list[dict]:
        """The answers to several prompts, `at_once` of them in flight."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, tokens, **sampling), prompts))

    def processes(self) -> list[psutil.Process]:
        """The server's process and all that descend from it."""
        try:
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


@dataclasses.dataclass(frozen=True)
class Reference:
    """Hugging Face's model on the CPU, of the server's checkpoint and dtype, and text to ask about."""

    model: object
    tokenizer: object
    text: list[int]

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Float32 [len(tokens), vocabulary]: row i judges what follows tokens[: i + 1]."""
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0].float()

    def prompt(self, length: int, start: int = 0) -> list[int]:
        """`length` consecutive tokens of a real text."""
        return self.text[start : start + length]


def pytest_generate_tests(metafunc):
    if "server" in metafunc.fixturenames:
        live = metafunc.config.getoption("--server-url")
        metafunc.parametrize("server", ["live"] if live else DTYPES, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A test that ends the server runs after all others that use it."""
    items.sort(key=lambda item: item.get_closest_marker("ends_server") is not None)


@pytest.fixture(scope="session")
def server(request, smollm2, tmp_path_factory):
    """The server under test; see this file's docstring."""
    if request.param == "live":
        yield _live(request.config)
        return
    model = str(smollm2(request.param))
    address = Address("127.0.0.1", free_port())
    log = tmp_path_factory.mktemp("server") / f"{request.param}.log"
    command = [sys.executable, "-m", "launch.cli", "serve", model, "--port", str(address.port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--dtype", request.param, *EXTRA_OPTIONS], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            wait_ready(process, address, READY_SECONDS)
            yield Server(str(address), model, request.param, _context(str(address)), process, log)
        except BaseException:
            print(log.read_text(errors="replace")[-4000:])
            raise
        finally:
            stop(process)


@pytest.fixture(scope="session")
def reference(server, root):
    """Hugging Face's side; where transformers cannot load a live server's model there is nothing to compare with."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(server.model)
        model = AutoModelForCausalLM.from_pretrained(server.model, dtype=getattr(torch, server.dtype))
    except OSError as error:
        pytest.skip(f"transformers cannot load {server.model} here: {error}")
    return Reference(model.eval(), tokenizer, tokenizer.encode((root / "LICENSE").read_text()))


def _live(config) -> Server:
    url, model = config.getoption("--server-url").rstrip("/"), config.getoption("--model")
    if not model:
        raise pytest.UsageError("--server-url needs --model: the name or folder of the model that it serves")
    return Server(url, model, _info(url)["dtype"], _context(url))


def _info(url: str) -> dict:
    return requests.get(f"{url}/get_server_info", timeout=30).json()


def _context(url: str) -> int:
    return _info(url)["context_length"]
