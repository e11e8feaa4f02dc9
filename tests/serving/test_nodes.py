"""A server whose chips are in two machines: the same command on each, with its number.

Both are this machine here; between the two processes all goes through the network, as bridge/distributed tests it with cables.
"""

import contextlib
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import random_models

from bridge.ports import free_port

TOKENS = 24
END_SECONDS = 10


@contextlib.contextmanager
def two_servers(serve, folder):
    """A server on each of two machines, of the model in `folder`."""
    options = ["--tp-size", "2", "--page-size", "32", "--skip-tokenizer-init"]
    options += ["--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}", "--node-rank"]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:

        def start(node: str):
            own = folder / f"node{node}"
            own.mkdir()
            return stack.enter_context(serve(folder / "model", "float32", own, *options, node))

        yield list(pool.map(start, ("0", "1")))


def stop_one(serve, folder, node: int) -> tuple[list, list[int]]:
    """Both servers and their exit statuses, after one has been told to stop."""
    random_models.make("qwen3", folder / "model", num_hidden_layers=1)
    with two_servers(serve, folder) as servers:
        servers[node].process.terminate()
        return servers, [server.process.wait(END_SECONDS) for server in servers]


def last_line(server) -> str:
    """Of what a server that has ended has written."""
    return server.log.read_text(errors="replace").strip().splitlines()[-1]


def test_two_machines(serve, tmp_path):
    """Greedy tokens equal Hugging Face's; when one machine loses its process, both servers end with status 1 and say why."""
    model = random_models.make("qwen3", tmp_path / "model")
    prompts = [random_models.prompt(length) for length in (1, 20, 133, 300)]
    with two_servers(serve, tmp_path) as (first, second):
        answers = first.generate_all(prompts, TOKENS)
        for prompt, answer in zip(prompts, answers, strict=True):
            said = answer["output_ids"]
            assert said == random_models.best_tokens(model, prompt, said), f"a prompt of {len(prompt)} tokens"
        time.sleep(1)  # so that nobody is about to hear from it
        (scheduler,) = [process for process in second.processes() if "scheduler" in process.name()]
        scheduler.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        assert [server.process.wait(END_SECONDS) for server in (first, second)] == [1, 1]
        assert time.monotonic() - killed < END_SECONDS
    for server in (first, second):
        assert last_line(server).startswith(f"error: rank 1 (process {scheduler.pid}"), last_line(server)
    assert "was ended by SIGKILL" in last_line(second)


def test_the_second_machine_is_stopped(serve, tmp_path):
    """Its server ends within seconds and well; the first one's, which cannot go on, with status 1 and the cause."""
    (first, _), statuses = stop_one(serve, tmp_path, 1)
    assert statuses == [1, 0]
    assert "error: rank 1 (process" in last_line(first)


def test_the_first_machine_is_stopped(serve, tmp_path):
    """The servers of all machines end well, and complain of nothing."""
    servers, statuses = stop_one(serve, tmp_path, 0)
    assert statuses == [0, 0]
    for server in servers:
        assert "error:" not in server.log.read_text(errors="replace")
