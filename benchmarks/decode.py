"""Decode speed of the server against Hugging Face's generate, and against what memory allows.

Both decode the same real model (SmolLM2-135M) greedily on the same cores in the
same run and take turns: while one is timed the other stands still. A figure is
the tokens per second after the first token, so that prefill does not count.
Each ratio is the server's figure over its peer's:

    hf_bf16_1, hf_bf16_4   bfloat16, one request and four (Hugging Face: a batch of four)
    hf_f32_1               float32, one request
    bound_bf16_1           over the bound: measured read bandwidth / bytes of weights read per token

    python benchmarks/decode.py [--rounds 3] [--tokens 64] [--prompt 16] [--json]
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

# torch is the peer here, on the CPU: where no TPU is presented torch_tpu's autoload would abort the process.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from bridge import ports  # noqa: E402
from launch import model, serve, server  # noqa: E402
from launch.checkpoint import smollm2_checkpoint  # noqa: E402

del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]  # not for the server

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"bf16": ("bfloat16", torch.bfloat16), "f32": ("float32", torch.float32)}


class Server:
    """A server of the checkpoint, which can be made to stand still."""

    def __init__(self, checkpoint: Path, dtype: str, log: Path):
        self.address = server.Address("127.0.0.1", ports.free_port())
        options = serve.options(model.find(str(checkpoint)).context, ("--dtype", dtype))
        self.process = server.start(server.command(str(checkpoint), self.address, options), log.open("wb"))
        server.wait_ready(self.process, self.address, 900)

    def stop(self) -> None:
        """End the server."""
        server.stop(self.process)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """No process of the server runs in here."""
        os.killpg(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGCONT)

    def arrivals(self, prompt: list[int], tokens: int) -> list[float]:
        """When each token of one streamed request arrived."""
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            "stream": True,
        }
        request = urllib.request.Request(
            f"{self.address}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        times: list[float] = []
        with urllib.request.urlopen(request, timeout=600) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                count = json.loads(line[6:])["meta_info"]["completion_tokens"]
                times += [time.perf_counter()] * (count - len(times))
        return times

    def speed(self, prompts: list[list[int]], tokens: int) -> float:
        """Tokens per second of all requests together, while all of them decode."""
        results: list[list[float]] = []
        threads = [
            threading.Thread(target=lambda prompt=prompt: results.append(self.arrivals(prompt, tokens)))
            for prompt in prompts
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(results) != len(prompts):
            sys.exit("decode: a request failed; the message is above")
        start, end = max(times[0] for times in results), min(times[-1] for times in results)
        return sum(sum(start < t <= end for t in times) for times in results) / (end - start)


def huggingface_speed(network, prompts: list[list[int]], tokens: int) -> float:
    """Tokens per second of generate on a batch, prefill and first token taken off."""
    batch = torch.tensor(prompts)

    def seconds(count: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            network.generate(
                batch, attention_mask=torch.ones_like(batch), max_new_tokens=count, min_new_tokens=count, do_sample=False
            )
        return time.perf_counter() - start

    return len(prompts) * (tokens - 1) / (seconds(tokens) - seconds(1))


def read_bandwidth() -> float:
    """Bytes per second that all cores together read from memory; the best of five passes over 1 GiB."""
    data = torch.ones(1 << 27, dtype=torch.int64)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best


def prompts(count: int, length: int) -> list[list[int]]:
    """Different prompts of one length, so that no cache holds one for another."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(1000, 40000, (count, length), generator=generator).tolist()


def measure(name: str, batches: tuple[int, ...], options: argparse.Namespace) -> dict[int, tuple[float, float]]:
    """Median tokens per second of the server and of Hugging Face, for each batch size."""
    dtype, torch_dtype = DTYPES[name]
    checkpoint = smollm2_checkpoint(ROOT / ".demo" / f"smollm2-135m-{dtype}", dtype)
    network = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch_dtype)
    figures: dict[int, tuple[list[float], list[float]]] = {batch: ([], []) for batch in batches}
    with tempfile.TemporaryDirectory() as folder:
        served = Server(checkpoint, dtype, Path(folder) / "server.log")
        try:
            for batch in batches:
                served.speed(prompts(batch, options.prompt), 8)
                for _ in range(options.rounds):
                    ours, theirs = figures[batch]
                    ours.append(served.speed(prompts(batch, options.prompt), options.tokens))
                    with served.standing_still():
                        theirs.append(huggingface_speed(network, prompts(batch, options.prompt), options.tokens))
                    print(f"{name}, {batch} at once: server {ours[-1]:.1f}, Hugging Face {theirs[-1]:.1f} tokens/s", flush=True)
        finally:
            served.stop()
    return {batch: (statistics.median(ours), statistics.median(theirs)) for batch, (ours, theirs) in figures.items()}


def weight_bytes() -> int:
    """Bytes of bfloat16 weights that one token reads: all of them, the tied embedding as the output's projection."""
    checkpoint = smollm2_checkpoint(ROOT / ".demo" / "smollm2-135m-bfloat16", "bfloat16")
    network = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    return sum(parameter.nbytes for parameter in network.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--tokens", type=int, default=64, help="tokens a request generates")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--json", action="store_true", help="print the ratios as JSON in the last line")
    options = parser.parse_args()
    ratios: dict[str, float] = {}
    for name, batches in (("bf16", (1, 4)), ("f32", (1,))):
        for batch, (ours, theirs) in measure(name, batches, options).items():
            ratios[f"hf_{name}_{batch}"] = ours / theirs
            if (name, batch) == ("bf16", 1):
                bound = read_bandwidth() / weight_bytes()
                ratios["bound_bf16_1"] = ours / bound
                print(f"bound: {bound:.1f} tokens/s")
    for label, ratio in ratios.items():
        print(f"{label}: {ratio:.2f}")
    if options.json:
        print(json.dumps({"benchmark": "decode", "ratios": {label: round(r, 3) for label, r in ratios.items()}}))


if __name__ == "__main__":
    main()
