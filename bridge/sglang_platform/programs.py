"""The compiled programs: the model's forward pass at one fixed shape each.

A program is traced from SGLang's own model code with torch_tpu's placeholders in
place of weights, pages and step data, so the whole forward pass is one
executable. Step data comes in as one array of integers, because every transfer
to the chip costs about as much as a small program.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from bridge.sglang_platform.attention import PagedAttention, Step


@dataclasses.dataclass(frozen=True, order=True)
class Shape:
    """What tells two programs of a model apart.

    Attributes:
        kind: "decode" (one token of each of `size` requests) or "prefill"
            (`size` consecutive tokens of one request).
        size: the bucket.
        all_logits: prefill only: logits of every token, not of the last alone.
    """

    kind: str
    size: int
    all_logits: bool = False

    def __str__(self) -> str:
        unit = "request" if self.kind == "decode" else "token"
        return f"{self.kind} of {self.size} {unit}{'s' * (self.size > 1)}" + ", all logits" * self.all_logits


def compile_function(
    function: Callable[..., Sequence[torch.Tensor]], arguments: Sequence[torch.Tensor], donated: Sequence[int], name: str
) -> Any:
    """Compile `function`, in the background, into one executable of torch_tpu.

    Args:
        function: from tensors to a flat list of tensors; traced, never run.
        arguments: tensors of the shapes and dtypes it will be called with; meta tensors do.
        donated: indices of arguments whose memory the outputs may take over.
        name: what the program is called in logs and profiles.

    Returns:
        A callable from the list of arguments to the list of results; `resolve()` waits
        for the compiler and raises its error.
    """
    from torch_tpu._internal.compile.compiler import StaticCompiler

    # The smallest graph that there is: torch_tpu traces what the single node calls.
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(f"argument_{index}") for index in range(len(arguments))]
    graph.output(graph.call_function(function, tuple(inputs)))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    compiler = StaticCompiler(async_compile=True)
    return compiler(module, list(arguments), donated_inputs=list(donated), module_name=name)


@contextlib.contextmanager
def _collectives_inside() -> Iterator[None]:
    """What is traced in here, the same on all ranks, keeps its collectives: else each would be a program of its own."""
    from torch_tpu._internal.distributed import tpu_distributed

    tpu_distributed.enter_spmd_safe_region()
    try:
        yield
    finally:
        tpu_distributed.exit_spmd_safe_region()


class ModelPrograms:
    """Compiles and runs programs of one model on one KV pool."""

    def __init__(self, model: torch.nn.Module, attention: PagedAttention, table_width: int):
        self._model = model
        self._attention = attention
        self._pool = attention.token_to_kv_pool
        self._table_width = table_width
        named = dict(model.named_parameters()) | dict(model.named_buffers())
        self._names = list(named)
        self._weights = list(named.values())

    def step_data_shape(self, shape: Shape) -> tuple[int, ...]:
        """Shape of the int32 array that a program takes.

        decode: a row per request: token id, position, page table.
        prefill: start, length, token ids, page table.
        """
        if shape.kind == "decode":
            return (shape.size, 2 + self._table_width)
        return (2 + shape.size + self._table_width,)

    def compile(self, shape: Shape) -> Any:
        """Start compiling; see compile_function."""
        caches = self._pool.caches
        data = torch.empty(self.step_data_shape(shape), dtype=torch.int32, device="meta")
        arguments = [data, *caches, *self._weights]
        name = f"{shape.kind}_{shape.size}" + "_all_logits" * shape.all_logits

        def function(data: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
            return self._trace(shape, data, tensors[: len(caches)], tensors[len(caches) :])

        return compile_function(function, arguments, range(1, 1 + len(caches)), name)

    def run(self, program: Any, data: torch.Tensor) -> torch.Tensor:
        """Run a compiled program on int32 `data` of the host; float32 logits on the host."""
        outputs = program([data.to(self._weights[0].device), *self._pool.caches, *self._weights])
        self._pool.replace(outputs[1:])
        return outputs[0].cpu()

    def _trace(
        self, shape: Shape, data: torch.Tensor, caches: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        data = data.long()
        if shape.kind == "decode":
            ids, positions, table = data[:, 0], data[:, 1], data[:, 2:]
            step = Step(list(caches), table, positions=positions)
            batch = self._forward_batch(ForwardMode.DECODE, ids, positions)
        else:
            start, length = data[0], data[1]
            ids, table = data[2 : 2 + shape.size], data[None, 2 + shape.size :]
            positions = start + torch.arange(shape.size, device=data.device)
            step = Step(list(caches), table, start=start, length=length)
            # In a decode batch SGLang's logits processor keeps all rows, in an extend
            # batch the last real one of each request.
            mode = ForwardMode.DECODE if shape.all_logits else ForwardMode.EXTEND
            batch = self._forward_batch(mode, ids, positions, length[None])
        with (
            torch.no_grad(),
            _collectives_inside(),
            # Some models compile a function of their own, which is part of the program here.
            torch.compiler.set_stance("force_eager"),
            self._attention.tracing(step),
            forward_context(ForwardContext(attn_backend=self._attention), forward_batch=batch),
        ):
            named = dict(zip(self._names, weights, strict=True))
            output = torch.func.functional_call(self._model, named, (ids, positions, batch))
        return [output.next_token_logits.float(), *step.caches]

    @staticmethod
    def _forward_batch(
        mode: ForwardMode, ids: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> ForwardBatch:
        """As much of SGLang's batch as a model's forward pass looks at."""
        return ForwardBatch(
            forward_mode=mode,
            batch_size=ids.shape[0] if lengths is None else 1,
            input_ids=ids,
            req_pool_indices=None,
            seq_lens=positions + 1 if lengths is None else lengths,
            out_cache_loc=None,
            seq_lens_sum=0,
            positions=positions,
            extend_seq_lens=lengths,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
