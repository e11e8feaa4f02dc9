"""The half of the operator benchmark that holds torch: runs operators on the chip and compares them with the CPU.

Reads one JSON request a line from standard input, answers one JSON line a step on the file
descriptor that is its argument; see op_conformance.py, which starts it and outlives its aborts.
"""

import dataclasses
import functools
import json
import os
import sys
import warnings

import torch
from torch.testing._internal.common_device_type import toleranceOverride
from torch.testing._internal import common_methods_invocations as database
from torch.utils import _pytree as pytree

DEVICE = "tpu"
# Of the chip against the CPU, before what OpInfo grants an operator: (absolute, relative).
TOLERANCES = {
    torch.float64: (1e-7, 1e-7),
    torch.complex128: (1e-7, 1e-7),
    torch.float32: (1e-5, 1e-5),
    torch.complex64: (1e-5, 1e-5),
    torch.float16: (1e-3, 2e-3),
    torch.bfloat16: (1e-2, 1.6e-2),
}
HIGHER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
# For operators that take neither float32 nor bfloat16: the first of these that they do take.
OTHER_DTYPES = ("int64", "bool", "complex64", "int32", "float16", "float64", "float8_e4m3fn")
# The values are whatever memory held: only shape and dtype can be compared.
UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
# torch_tpu computes x - y * floor(x / y): in bfloat16 as exact as the last place of x.
GRANTED = {("remainder", torch.bfloat16): (0.0625, 0.0), ("__rmod__", torch.bfloat16): (0.0625, 0.0)}
# Arguments of these steer the host and stay there.
STEERED = ("tensor_split",)
# Repetitions of an operator that draws random numbers, from which its distribution is seen.
DRAWS = 200
# Times that an operator's inputs are changed in their last place, to see what that decides.
SHAKES = 16


def _moved(value):
    """A sample's tensor on the chip; devices in keyword arguments become the chip too."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(DEVICE).requires_grad_(value.requires_grad)
    if isinstance(value, torch.device) or value == "cpu":
        return DEVICE
    return value


def _raised(dtype):
    """A function that lifts tensors and dtypes of `dtype` to the next wider type."""

    def lift(value):
        if isinstance(value, torch.Tensor) and value.dtype in HIGHER:
            return value.detach().to(HIGHER[value.dtype]).requires_grad_(value.requires_grad)
        return HIGHER.get(value, value) if value is dtype else value

    return lift


def _shaken(dtype, seed: int):
    """A function that changes raised tensors by at most one unit in the last place of `dtype`."""
    generator = torch.Generator().manual_seed(seed)

    def shake(value):
        if not isinstance(value, torch.Tensor) or value.dtype is not HIGHER[dtype]:
            return value
        change = torch.rand(value.shape, generator=generator) * 2 - 1
        return (value.detach() * (1 + change * torch.finfo(dtype).eps)).requires_grad_(value.requires_grad)

    return shake


def _copied(value):
    """A copy, so that an operator that writes to its input leaves the sample as it was."""
    if not isinstance(value, torch.Tensor):
        return value
    form = {"memory_format": torch.preserve_format} if value.layout == torch.strided else {}
    return value.detach().clone(**form).requires_grad_(value.requires_grad)


@dataclasses.dataclass(frozen=True)
class Call:
    """One sample of one operator, ready to run wherever its tensors are."""

    op: object
    sample: object

    def mapped(self, function) -> "Call":
        """The same call with `function` over every tensor, dtype and device."""
        input, args, kwargs = pytree.tree_map(function, (self.sample.input, self.sample.args, self.sample.kwargs))
        sample = type(self.sample)(input, args=args, kwargs=kwargs)
        sample.output_process_fn_grad = self.sample.output_process_fn_grad
        return Call(self.op, sample)

    def moved(self) -> "Call":
        """The call on the chip."""
        there = self.mapped(_moved)
        if self.op.name in STEERED:
            there.sample.args = self.sample.args
        return there

    def run(self, seed: int = 0) -> list:
        """The tensors and numbers that the operator returns, on the CPU."""
        torch.manual_seed(seed)
        call = self.mapped(_copied)
        result = self.op(call.sample.input, *call.sample.args, **call.sample.kwargs)
        return [_to_host(leaf) for leaf in pytree.tree_leaves(CANONICAL.get(self.op.name, _same)(result))]

    def gradients(self, seed: int = 0) -> list:
        """Gradients of a fixed linear function of the results, of every input that asks for them, on the CPU."""
        torch.manual_seed(seed)
        call = self.mapped(_copied)
        sample = call.sample
        result = self.op.gradcheck_wrapper(self.op.get_op(), sample.input, *sample.args, **sample.kwargs)
        leaves = pytree.tree_leaves(sample.output_process_fn_grad(result))
        outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        inputs = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
        inputs = [leaf for leaf in inputs if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not outputs or not inputs:
            return []
        weights = [_weights(output) for output in outputs]
        return [_to_host(grad) for grad in torch.autograd.grad(outputs, inputs, weights, allow_unused=True)]


def _weights(like: torch.Tensor) -> torch.Tensor:
    """Numbers between 0.5 and 1.5 that do not depend on dtype or device."""
    count = torch.arange(like.numel(), dtype=torch.float64).reshape(like.shape)
    return (1 + 0.5 * torch.sin(count * 1.7)).to(like.dtype).to(like.device)


def _same(result):
    return result


def _to_host(leaf):
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach().to("cpu")
    return leaf if leaf.layout == torch.strided else leaf.to_dense()


# ---- Results that are defined only up to a choice are compared by what they must fulfil


def _eigh(result):
    values, vectors = result
    return values, (vectors * values.unsqueeze(-2).to(vectors.dtype)) @ vectors.mH


def _svd(result, conjugate=True):
    u, s, v = result
    vh = v if conjugate else v.mH
    k = s.shape[-1]
    return s, (u[..., :, :k] * s.unsqueeze(-2).to(u.dtype)) @ vh[..., :k, :]


def _normalized(result):
    # Accelerators keep mean and deviation in float32, the CPU in the input's dtype.
    return [part.to(result[0].dtype) for part in result]


CANONICAL = {
    "linalg.eigh": _eigh,
    "linalg.svd": _svd,
    "svd": lambda result: _svd(result, conjugate=False),
    "svd_lowrank": lambda result: _svd(result, conjugate=False),
    "pca_lowrank": lambda result: _svd(result, conjugate=False),
    "native_layer_norm": _normalized,
    "native_batch_norm": _normalized,
    "_native_batch_norm_legit": _normalized,
}


# ---- Comparison


def tolerance(op, dtype: torch.dtype) -> tuple[float, float]:
    """(absolute, relative): ours, or the widest that OpInfo grants the operator in this dtype."""
    granted = [TOLERANCES.get(dtype, (0.0, 0.0)), GRANTED.get((op.name, dtype), (0.0, 0.0))]
    for decorator in op.decorators:
        for one in getattr(decorator, "decorators", [decorator]):
            if isinstance(one, toleranceOverride) and dtype in one.d:
                granted.append((one.d[dtype].atol, one.d[dtype].rtol))
    return max(a for a, _ in granted), max(r for _, r in granted)


def _close(a, b, atol, rtol):
    return torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)


@dataclasses.dataclass(frozen=True)
class Reference:
    """What the CPU computes, and how well that is determined.

    Attributes:
        same: results in the chip's dtype.
        high: results in a wider dtype; `same` again where the CPU has no such kernel.
        shaken: results in the wider dtype of inputs that were changed in their last place.
    """

    same: list
    high: list
    shaken: list[list]


def _number_differs(got, same, limits) -> str | None:
    if got == same or (got != got and same != same):
        return None
    if isinstance(same, float | complex) and abs(got - same) <= limits[0] + limits[1] * abs(same):
        return None
    return f"{got!r} instead of {same!r}"


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def differs(got, same, high, shaken, limits) -> str | None:
    """How one result of the chip differs from the CPU's, None where it does not.

    An element is right if it is within the tolerance of the CPU's result in the same or in the
    wider dtype, or no further from that than four times what the last place of the inputs
    decides, or, in float32, than twice the CPU's own largest error.

    Args:
        got: the chip's.
        same, high, shaken: one result out of Reference.
        limits: (absolute, relative) tolerance.
    """
    if not isinstance(same, torch.Tensor):
        return _number_differs(got, same, limits)
    if (got.shape, got.dtype) != (same.shape, same.dtype):
        return f"{got.dtype} {list(got.shape)} instead of {same.dtype} {list(same.shape)}"
    a, exact = _wide(got), not (same.is_floating_point() or same.is_complex())
    references = [_wide(one) for one in (same, high, *shaken) if one.shape == same.shape]
    if exact:
        good = functools.reduce(torch.logical_or, [a == one for one in references])
    else:
        close = [torch.isclose(a, one.to(a.dtype), rtol=limits[1], atol=limits[0], equal_nan=True) for one in references]
        spread = functools.reduce(torch.maximum, [(one - references[1]).abs() for one in references])
        allowed = 4 * spread
        if same.dtype in (torch.float32, torch.complex64) and same.numel():
            own = (references[0] - references[1]).abs()
            allowed = allowed.maximum(2 * own[own.isfinite()].max()) if own.isfinite().any() else allowed
        good = functools.reduce(torch.logical_or, close) | ((a - references[1]).abs() <= allowed)
    if good.all():
        return None
    worst = int((~good).flatten().int().argmax())
    amount = f"{int((~good).sum())} of {good.numel()} elements"
    return f"{amount}, {got.flatten()[worst].item()} instead of {same.flatten()[worst].item()}"


def compare(got: list, reference: Reference, limits) -> str | None:
    """The first difference between the chip's results and the CPU's."""
    if len(got) != len(reference.same):
        return f"{len(got)} results instead of {len(reference.same)}"
    for index, (mine, same) in enumerate(zip(got, reference.same, strict=True)):
        shaken = [results[index] for results in reference.shaken if len(results) == len(got)]
        text = differs(mine, same, reference.high[index] if len(reference.high) == len(got) else same, shaken, limits)
        if text:
            return text
    return None


def _pooled(draws: list[list], atol: float) -> list[torch.Tensor]:
    """For every result, the values of all draws in one sorted row; complex ones as pairs."""
    rows = []
    for values in zip(*draws, strict=True):
        tensors = [value if isinstance(value, torch.Tensor) else torch.tensor(value) for value in values]
        flat = torch.cat([(torch.view_as_real(t) if t.is_complex() else t).reshape(-1).double() for t in tensors])
        rows.append(torch.where(flat.abs() <= atol, 0.0, flat).nan_to_num(nan=-1e300).sort().values)
    return rows


def compare_draws(got: list[list], same: list[list], independent: int, atol: float) -> str | None:
    """Kolmogorov and Smirnov's distance between the values that chip and CPU draw.

    Args:
        got, same: the results of each draw, on the chip and on the CPU.
        independent: how many elements of one result are taken to be drawn by themselves.
        atol: values that near to zero are the same.
    """
    for first, second in zip(got[0], same[0], strict=True):
        if isinstance(second, torch.Tensor) and (first.shape, first.dtype) != (second.shape, second.dtype):
            return f"{first.dtype} {list(first.shape)} instead of {second.dtype} {list(second.shape)}"
    for a, b in zip(_pooled(got, atol), _pooled(same, atol), strict=True):
        if a.numel() == 0:
            continue
        points = torch.cat([a, b]).unique()
        below = [torch.searchsorted(row, points, right=True).double() / row.numel() for row in (a, b)]
        distance = float((below[0] - below[1]).abs().max())
        count = len(got) * min(independent, a.numel() // len(got))
        if distance > 0.02 + 2.5 * (2 / count) ** 0.5:
            return f"distributions are {distance:.3f} apart"
    return None


# ---- One operator


def dtypes_of(op) -> list[str]:
    """float32 and bfloat16 where the operator takes them on the CPU, else one dtype that it takes; "gradient" last."""
    taken = {str(dtype).removeprefix("torch.") for dtype in op.supported_dtypes("cpu")}
    wanted = [dtype for dtype in ("float32", "bfloat16") if dtype in taken]
    if not wanted:
        wanted = [dtype for dtype in OTHER_DTYPES if dtype in taken][:1]
    if "float32" in wanted and op.supports_autograd:
        wanted.append("gradient")
    return wanted


def samples(op, dtype: torch.dtype, wanted: int, gradient: bool) -> list[Call]:
    """`wanted` of the operator's sample inputs, spread over all of them; all where `wanted` is 0."""
    torch.manual_seed(0)
    every = list(op.sample_inputs("cpu", dtype, requires_grad=gradient))
    if wanted and len(every) > wanted:
        every = [every[index * (len(every) - 1) // max(wanted - 1, 1)] for index in range(wanted)]
    return [Call(op, sample) for sample in every]


def check(call: Call, limits, gradient: bool) -> str | None:
    """How the chip's result differs from the CPU's; raises what the operator raises on the chip."""
    run = Call.gradients if gradient else Call.run
    same = run(call)
    on_chip = call.moved()
    if call.op.name in UNDEFINED:
        got = [(leaf.shape, leaf.dtype) for leaf in on_chip.run()]
        return None if got == [(leaf.shape, leaf.dtype) for leaf in same] else f"shape or dtype: {got}"
    if _draws(call, run, same):
        seeds = range(DRAWS)
        draws = [[run(one, seed) for seed in seeds] for one in (on_chip, call)]
        # Elements may depend on each other: those of a dropped channel, and all of a gradient.
        return compare_draws(*draws, 1 if gradient else 8, limits[0])
    got = run(on_chip)
    # What is costly is only computed where the plain comparison fails.
    if compare(got, Reference(same, same, []), limits) is None:
        return None
    return compare(got, _reference(call, run, same), limits)


def _draws(call: Call, run, same: list) -> bool:
    """Whether the operator's result depends on the seed; a small one may be the same twice by chance."""
    small = sum(leaf.numel() for leaf in same if isinstance(leaf, torch.Tensor)) < 16
    plain = Reference(same, same, [])
    return any(compare(run(call, seed), plain, (0.0, 0.0)) for seed in range(1, 16 if small else 2))


def _reference(call: Call, run, same: list) -> Reference:
    tensors = pytree.tree_leaves((call.sample.input, call.sample.args))
    dtype = next((t.dtype for t in tensors if isinstance(t, torch.Tensor) and t.dtype in HIGHER), None)
    try:
        raised = call.mapped(_raised(dtype))
        return Reference(same, run(raised), [run(raised.mapped(_shaken(dtype, seed))) for seed in range(SHAKES)])
    except Exception:  # the CPU has no such kernel: the comparison goes without
        return Reference(same, same, [])


class Child:
    """Answers requests."""

    def __init__(self, descriptor: int):
        self._out = os.fdopen(descriptor, "w", buffering=1)
        self._ops = {op.formatted_name: op for op in database.op_db}

    def say(self, **message) -> None:
        """One line of JSON to the parent."""
        self._out.write(json.dumps(message) + "\n")

    def catalogue(self) -> None:
        """Every operator with its dtypes."""
        self.say(operators={name: dtypes_of(op) for name, op in self._ops.items()})

    def work(self, operator: str, dtype: str, wanted: int, skip: list[int]) -> None:
        """Run an operator's samples but those in `skip`; a line before and after each."""
        op, gradient = self._ops[operator], dtype == "gradient"
        torch_dtype = getattr(torch, "float32" if gradient else dtype)
        try:
            calls = samples(op, torch_dtype, wanted, gradient)
        except Exception as error:  # cannot be sampled here, for example without a GPU
            self.say(done=True, unsampled=f"{type(error).__name__}: {error}")
            return
        limits = tolerance(op, torch_dtype)
        for index, call in enumerate(calls):
            if index in skip:
                continue
            self.say(sample=index)
            self.say(sample=index, **self._one(call, limits, gradient))
        self.say(done=True)

    def _one(self, call: Call, limits, gradient: bool) -> dict:
        try:
            (Call.gradients if gradient else Call.run)(call)
        except Exception as error:  # the CPU refuses the sample: nothing to compare with
            return {"kind": "unsampled", "detail": f"{type(error).__name__}: {error}"}
        try:
            difference = check(call, limits, gradient)
        except Exception as error:
            return {"kind": "error", "detail": f"{type(error).__name__}: {error}"}
        return {"kind": "mismatch", "detail": difference} if difference else {"kind": "pass"}


def main() -> None:
    warnings.filterwarnings("ignore")
    # The database's random operators set a seed of their own, which would hide that they are random.
    database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    child = Child(int(sys.argv[1]))
    child.catalogue()
    for line in sys.stdin:
        request = json.loads(line)
        child.work(request["operator"], request["dtype"], request["samples"], request["skip"])


if __name__ == "__main__":
    main()
