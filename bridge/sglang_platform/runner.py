"""Which program runs a batch, and with what data.

Every batch becomes calls of programs that are compiled already: a decode batch is
padded to the next bucket or split over several calls, a prompt is cut into the
compiled lengths. Only a prompt's log-probabilities, which need the logits of each
of its tokens, add a program, with a warning.
"""

import copy
import logging
import time
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from bridge.errors import CompileError
from bridge.sglang_platform.buckets import chunks, page_rows, pieces
from bridge.sglang_platform.programs import ModelPrograms, Shape

logger = logging.getLogger(__name__)


class ProgramRunner:
    """Takes the place of SGLang's decode, prefill and eager runners."""

    def __init__(self, model_runner: Any, decode_sizes: list[int], prefill_sizes: list[int]):
        self._model_runner = model_runner
        self._page_size = model_runner.page_size
        self._req_to_token = model_runner.req_to_token_pool.req_to_token.numpy()
        self._table_width = -(-model_runner.model_config.context_len // self._page_size)
        self._programs = ModelPrograms(model_runner.model, model_runner.attn_backend, self._table_width)
        self._compiled: dict[Shape, Any] = {}
        self.capture_bs = decode_sizes
        self._prefill_sizes = prefill_sizes
        began = time.perf_counter()
        self.warm_up()
        self.warm_up_seconds = time.perf_counter() - began

    def warm_up(self) -> None:
        """Compile every program that was asked for, several at once, and run each on padding."""
        shapes = [Shape("decode", size) for size in self.capture_bs]
        shapes += [Shape("prefill", size) for size in self._prefill_sizes]
        began = time.perf_counter()
        pending = {}
        for number, shape in enumerate(shapes, 1):
            logger.info("Compiling program %d of %d: %s", number, len(shapes), shape)
            pending[shape] = self._programs.compile(shape)
        for number, (shape, program) in enumerate(pending.items(), 1):
            self._finish(shape, program)
            passed = time.perf_counter() - began
            logger.info("Program %d of %d is ready: %s (%.1f s since the first)", number, len(shapes), shape, passed)

    def _finish(self, shape: Shape, program: Any) -> None:
        try:
            program.resolve()
        except Exception as error:
            # torch.fx appends the whole graph, weights by the hundred.
            cause = str(error).partition("\n\nWhile executing")[0]
            raise CompileError(f"the program for a {shape} could not be compiled: {cause}") from error
        self._compiled[shape] = program
        self._programs.run(program, torch.zeros(self._programs.step_data_shape(shape), dtype=torch.int32))

    def _program(self, shape: Shape) -> Any:
        if shape not in self._compiled:
            logger.warning("Compiling a program that was not compiled at start: %s", shape)
            self._finish(shape, self._programs.compile(shape))
        return self._compiled[shape]

    def can_run_graph(self, forward_batch: Any) -> bool:
        return True

    def execute(self, forward_batch: Any, **_arguments: Any) -> LogitsProcessorOutput:
        """Run SGLang's batch of host tensors; logits on the host."""
        if forward_batch.forward_mode.is_decode():
            return self._decode(forward_batch)
        if forward_batch.forward_mode.is_extend():
            return self._prefill(forward_batch)
        raise CompileError(f"a batch in mode {forward_batch.forward_mode.name} has no program on this chip")

    def _page_rows(self, slots: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return page_rows(self._req_to_token[slots], lengths, self._page_size, self._table_width)

    def _decode(self, forward_batch: Any) -> LogitsProcessorOutput:
        requests = forward_batch.batch_size
        slots = forward_batch.req_pool_indices.numpy()
        positions = forward_batch.positions.numpy()
        data = np.empty((requests, 2 + self._table_width), dtype=np.int32)
        data[:, 0] = forward_batch.input_ids.numpy()
        data[:, 1] = positions
        data[:, 2:] = self._page_rows(slots, positions + 1)
        logits, done = [], 0
        for rows, bucket in pieces(requests, self.capture_bs):
            padded = np.zeros((bucket, data.shape[1]), dtype=np.int32)
            padded[:rows] = data[done : done + rows]
            out = self._programs.run(self._program(Shape("decode", bucket)), torch.from_numpy(padded))
            logits.append(out[:rows])
            done += rows
        return LogitsProcessorOutput(next_token_logits=_joined(logits))

    def _prefill(self, forward_batch: Any) -> LogitsProcessorOutput:
        starts, lengths = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        ends = np.asarray(starts) + np.asarray(lengths)
        tables = self._page_rows(forward_batch.req_pool_indices.numpy(), ends)
        prompts = np.split(forward_batch.input_ids.numpy(), np.cumsum(lengths)[:-1])
        scored = _rows_with_logprobs(forward_batch)
        logits = [
            self._prefill_request(prompt, start, table, rows)
            for prompt, start, table, rows in zip(prompts, starts, tables, scored, strict=True)
        ]
        if any(scored):
            return self._with_input_logprobs(logits, scored, forward_batch)
        return LogitsProcessorOutput(next_token_logits=_joined(logits))

    def _prefill_request(self, prompt: np.ndarray, start: int, table: np.ndarray, scored: int) -> torch.Tensor:
        """Float32 logits of the prompt's last `scored` tokens, at least of the last one."""
        logits, done = [], 0
        for rows, bucket in chunks(start, len(prompt), self._prefill_sizes):
            data = np.zeros(2 + bucket + self._table_width, dtype=np.int32)
            data[:2] = start + done, rows
            data[2 : 2 + rows] = prompt[done : done + rows]
            data[2 + bucket :] = table
            shape = Shape("prefill", bucket, all_logits=scored > 0)
            out = self._programs.run(self._program(shape), torch.from_numpy(data))
            logits.append(out[:rows])
            done += rows
        return _joined(logits)[-max(1, scored) :]

    def _with_input_logprobs(
        self, logits: list[torch.Tensor], scored: list[int], forward_batch: Any
    ) -> LogitsProcessorOutput:
        """SGLang's own log-probabilities of the prompts, from their logits in place of hidden states.

        Each request looks as if it began with the first row that there is.
        """
        batch = copy.copy(forward_batch)
        batch.extend_seq_lens_cpu = [len(rows) for rows in logits]
        batch.extend_logprob_start_lens_cpu = [len(rows) - wanted for rows, wanted in zip(logits, scored, strict=True)]
        processor = copy.copy(self._model_runner.model.logits_processor)
        processor._get_logits = lambda states, *_args, **_kwargs: states
        return processor(forward_batch.input_ids, _joined(logits), None, batch)


def _rows_with_logprobs(forward_batch: Any) -> list[int]:
    """For each request, of how many of its tokens the log-probabilities are asked for; the last ones."""
    lengths = forward_batch.extend_seq_lens_cpu
    if not forward_batch.return_logprob:
        return [0] * len(lengths)
    return [length - start for length, start in zip(lengths, forward_batch.extend_logprob_start_lens_cpu, strict=True)]


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
