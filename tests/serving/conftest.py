"""The server under test, and Hugging Face's answer to the same question.

Without options, two servers are started one after the other through
`tt-tpu serve`, SmolLM2-135M in float32 and in bfloat16. With --server-url the
same tests talk to a live server; those that need its process are left out.
"""

import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bridge.compiler import frames
from bridge.ports import free_port
from launch.serve import CONTEXT
from launch.server import Address, stop, wait_ready

DTYPES = ("float32", "bfloat16")
READY_SECONDS = 600
SHARED_MEMORY = Path("/dev/shm")


@dataclasses.dataclass
class Server:
    """A server under test.

    Attributes:
        url: where it answers.
        model: folder or name of its model.
        dtype: "float32" or "bfloat16".
        context: its context length in tokens.
        process: what `tt-tpu serve` started; None for a live server.
        log: the file of its output; None for a live server.
        shared_memory_before: the machine's shared-memory segments before it was started.
        peak_memory: largest sum of resident bytes of its processes so far.
    """

    url: str
    model: str
    dtype: str
    context: int
    process: subprocess.Popen | None = None
    log: Path | None = None
    shared_memory_before: frozenset[Path] = frozenset()
    peak_memory: int = 0

    def post(self, path: str, body=None, **options) -> requests.Response:
        """POST `body` as JSON."""
        return requests.post(self.url + path, json=body, timeout=300, **options)

    def generate(self, prompt: list[int] | str, tokens: int = 16, replica: int | None = None, **sampling) -> dict:
        """/generate's answer to token ids or a text, by one replica if it is named; greedy unless told otherwise, end of
        text ignored."""
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True} | sampling
        question = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        question |= {} if replica is None else {"routed_dp_rank": replica}
        answer = self.post("/generate", question | {"sampling_params": params})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def generate_all(self, prompts: list, tokens: int = 16, at_once: int = 4, **sampling) -> list[dict]:
        """The answers to several prompts, `at_once` of them in flight."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, tokens, **sampling), prompts))

    def get(self, path: str):
        """GET; the JSON of the answer."""
        answer = requests.get(self.url + path, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def info(self) -> dict:
        """The server's arguments and state, as SGLang reports them."""
        return self.get("/server_info")

    def processes(self) -> list[psutil.Process]:
        """The server's process and all that descend from it."""
        try:
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def compile_requests(self) -> int:
        """How many programs the server's compile service was asked for, those found in its store included.

        It is started for the first program that torch_tpu's own cache does not have.
        """
        running = (p for p in self.processes() if p.status() != psutil.STATUS_ZOMBIE)
        services = [p for p in running if "bridge.compiler.service" in p.cmdline()]
        if not services:
            assert not any(state["compiled_programs"] for state in self.info()["internal_states"])
            return 0
        (service,) = services
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(service.cmdline()[-1])
            frames.send(connection, frames.Kind.STATS)
            counts = json.loads(frames.receive(connection)[1][0])
        return counts["compiled"] + counts["store_hits"] + counts["failed"]

    def watch_memory(self) -> None:
        """Keep `peak_memory`, the largest sum of the tree's resident bytes seen, until the server ends."""
        while self.process.poll() is None:
            self.peak_memory = max(self.peak_memory, sum(map(_resident, self.processes())))
            time.sleep(0.25)


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


@dataclasses.dataclass(frozen=True)
class Reference:
    """Hugging Face's model on the CPU, of the server's checkpoint and dtype, and text to ask about.

    Attributes:
        model: in the server's dtype.
        exact: the same weights in float32.
        tokenizer: the model's.
        text: tokens of a real text.
    """

    model: object
    exact: object
    tokenizer: object
    text: list[int]

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Float32 [len(tokens), vocabulary]: row i judges what follows tokens[: i + 1]."""
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0].float()

    def greedy(self, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
        """`tokens` tokens by greedy choice, with a cache as in generate(); at each the gap between the two best logits.

        An end of text is a token like others, which generate() has no option for.
        """
        answer, gaps, last, cache = [], [], prompt, None
        while len(answer) < tokens:
            with torch.inference_mode():
                output = self.model(torch.tensor([last]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            logits = output.logits[0, -1].float()
            best, second = logits.topk(2).values.tolist()
            last = [logits.argmax().item()]
            answer += last
            gaps.append(best - second)
        return answer, gaps

    def exact_logits(self, tokens: list[int]) -> torch.Tensor:
        """As `logits`, computed in float32 whatever the server's dtype."""
        with torch.inference_mode():
            return self.exact(torch.tensor([tokens])).logits[0]

    def prompt(self, length: int, start: int = 0) -> list[int]:
        """`length` consecutive tokens of a real text."""
        return self.text[start : start + length]


def pytest_configure(config):
    config.addinivalue_line("markers", "needs_process: looks at the server's processes; left out for a live server")
    config.addinivalue_line("markers", "ends_server: ends the server, so it runs after all others")


def pytest_generate_tests(metafunc):
    if "server" in metafunc.fixturenames:
        live = metafunc.config.getoption("--server-url")
        metafunc.parametrize("server", ["live"] if live else DTYPES, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.get_closest_marker("ends_server") is not None)
    if config.getoption("--server-url"):
        left_out = [item for item in items if item.get_closest_marker("needs_process")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def server(request, smollm2, tmp_path_factory):
    """The server under test; see this file's docstring."""
    if request.param == "live":
        yield _live(request.config)
        return
    with running(smollm2(request.param), request.param, tmp_path_factory.mktemp("server")) as under_test:
        yield under_test


@contextlib.contextmanager
def running(model: Path, dtype: str, folder: Path, *options: str) -> Iterator[Server]:
    """A server of `model` by `tt-tpu serve` with further `options`, its log in `folder`."""
    address = Address("127.0.0.1", free_port())
    command = [sys.executable, "-m", "launch.cli", "serve", str(model), "--port", str(address.port), "--dtype", dtype]
    log = folder / f"{dtype}.log"
    with log.open("wb") as output:
        before = frozenset(SHARED_MEMORY.iterdir())
        process = subprocess.Popen([*command, *options], stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        under_test = Server(str(address), str(model), dtype, CONTEXT, process, log, before)
        threading.Thread(target=under_test.watch_memory, daemon=True).start()
        try:
            wait_ready(process, address, READY_SECONDS)
            yield under_test
        finally:
            stop(process, seconds=20)
            print(log.read_text(errors="replace")[-8000:])  # pytest shows it with a test that failed


@pytest.fixture(scope="session")
def serve():
    """running(): for a test that needs a server of its own."""
    return running


def _live(config) -> Server:
    url, model = config.getoption("--server-url").rstrip("/"), config.getoption("--model")
    if not model:
        raise pytest.UsageError("--server-url needs --model: the name or folder of the model that it serves")
    info = Server(url, model, "", 0).info()
    return Server(url, model, info["dtype"], info["context_length"])


@pytest.fixture(scope="session")
def reference(server, root):
    """Hugging Face's side; where transformers cannot load a live server's model there is nothing to compare with."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(server.model)
        exact = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32).eval()
        model = AutoModelForCausalLM.from_pretrained(server.model, dtype=getattr(torch, server.dtype)).eval()
    except OSError as error:
        pytest.skip(f"transformers cannot load {server.model} here: {error}")
    return Reference(model, exact, tokenizer, tokenizer.encode((root / "LICENSE").read_text()))
