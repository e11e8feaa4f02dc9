"""Whose fault a result of the operator benchmark is, and the table of all of them.

A fault is torch_tpu's only where the evidence says that it lies before our plugin: an exception
of its own words, an abort inside its own code, or one of the wrong results below, each looked
into by hand. All else counts as ours.
"""

import dataclasses
import enum
import re
from collections import defaultdict
from collections.abc import Iterable


class Verdict(enum.Enum):
    """Of a sample or of a row; a row is as bad as its worst sample."""

    FAILURE = "failure"
    GAP = "gap"
    PASS = "pass"
    UNSAMPLED = "unsampled"


@dataclasses.dataclass(frozen=True)
class Sample:
    """What one sample input came to.

    Attributes:
        kind: "pass", "unsampled" (the CPU has no result), "mismatch", "error", "abort" or "timeout".
        detail: how it differs, the exception, or the last words of the process.
        log: what torch_tpu and XLA wrote meanwhile.
    """

    kind: str
    detail: str = ""
    log: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """One operator in one dtype ("gradient" is backward in float32)."""

    operator: str
    dtype: str
    samples: tuple[Sample, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of the samples."""
        found = {judge(self.operator, self.dtype, sample)[0] for sample in self.samples}
        return next((verdict for verdict in Verdict if verdict in found), Verdict.UNSAMPLED)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the row does not pass, each reason once; of an unsampled row, why there is nothing to compare with."""
        judged = [judge(self.operator, self.dtype, sample) for sample in self.samples]
        return tuple(dict.fromkeys(reason for verdict, reason in judged if verdict is self.verdict and reason))


# torch_tpu puts these words before every error that the plugin has returned.
_FROM_THE_PLUGIN = "the XLA compiler failed with"
# Said by a later operation whose input has failed; the log holds the first error.
_CONSEQUENCE = "a required argument is in a failed state"
# torch_tpu's and the dispatcher's own refusals: raised before there is a program.
_REFUSALS = re.compile(
    r"is not implemented for TPU|"
    r"Could not run 'aten::\S+' with arguments from the '\w*(tpu|TPU|PrivateUse1)\w*' backend|"
    # "silu(): expected …", "mm(): not implemented for …": its checks name the operation
    r"^\w+: [a-z_0-9]+\(\): "
)
# Only torch_tpu builds MLIR in the process of the program; the compiler has a process of its own.
_BUILDS_MLIR = "Failed to infer result type(s)"


@dataclasses.dataclass(frozen=True)
class KnownGap:
    """A wrong result whose origin was found in what torch_tpu does before our plugin.

    Attributes:
        dtype: of the row.
        pattern: what the difference looks like; another one counts as ours.
        reason: the evidence.
    """

    dtype: str
    pattern: str
    reason: str


_REFLECTION = KnownGap(
    "gradient",
    # The right number with the wrong sign.
    r"elements, (-?)(\d+\.?\d?)\d* instead of (?!\1)-?\2",
    "grid_sampler_2d_backward and _3d_ scale by a positive constant where reflection padding turns the sign",
)
KNOWN_GAPS = {
    "__getitem__": KnownGap(
        "gradient",
        r"of 625 elements",
        "index_put with indices on both sides of a slice returns a tensor of permuted shape: the shape, which no "
        "plugin sees, is wrong already",
    ),
    "grid_sampler_2d": _REFLECTION,
    "grid_sampler_3d": _REFLECTION,
    "nn_functional_grid_sample": _REFLECTION,
    "nn_functional_avg_pool1d": KnownGap(
        "gradient",
        r"^0 results instead of 1$",
        "a kernel for avg_pool1d without autograd: the result has no gradient function",
    ),
    "nn_functional_pdist": KnownGap(
        "gradient", r"nan instead of 0\.0", "pdist_backward of one row is a program that returns the constant NaN"
    ),
    "torch__scaled_mm": KnownGap(
        "float8_e4m3fn", r"nan instead of", "scaled_mm converts to float8 without the clamp that keeps it finite"
    ),
}


def judge(operator: str, dtype: str, sample: Sample) -> tuple[Verdict, str]:
    """Verdict and reason of one sample."""
    if sample.kind == "pass":
        return Verdict.PASS, ""
    if sample.kind == "unsampled":
        return Verdict.UNSAMPLED, first_line(sample.detail)
    if sample.kind == "mismatch":
        known = KNOWN_GAPS.get(operator)
        if known and known.dtype == dtype and re.search(known.pattern, sample.detail):
            return Verdict.GAP, f"wrong result: {known.reason}"
        return Verdict.FAILURE, f"wrong result: {sample.detail}"
    if sample.kind == "abort":
        return _judge_abort(sample)
    if sample.kind == "error":
        return _judge_error(sample)
    return Verdict.FAILURE, f"{sample.kind}: {sample.detail}"


def _judge_error(sample: Sample) -> tuple[Verdict, str]:
    text = sample.detail
    if _CONSEQUENCE in text:
        causes = re.findall(r"ExecutionTask failed: (.*)", sample.log)
        text = causes[0] if causes else text
    own = _FROM_THE_PLUGIN not in text and _REFUSALS.search(text)
    return Verdict.GAP if own else Verdict.FAILURE, f"error: {first_line(text)}"


def _judge_abort(sample: Sample) -> tuple[Verdict, str]:
    frames = re.findall(r"@\s+0x[0-9a-f]+\s+([\w:~]+)", sample.log)
    inside = next((frame for frame in frames if not frame.startswith("absl::")), "")
    own = inside.startswith("torch_tpu::") or _BUILDS_MLIR in sample.detail
    # Without time and process number, which say nothing.
    text = re.sub(r"^F\d+ [\d:.]+\s+\d+ ", "", sample.detail)
    return Verdict.GAP if own else Verdict.FAILURE, f"abort: {first_line(text)}"


def first_line(text: str) -> str:
    """The first line, without what is advice, and not without end."""
    return text.split("\n")[0].split(". Please file")[0][:300]


def ratios(rows: Iterable[Row]) -> dict[str, float]:
    """pass_<dtype>: passed over attempted, torch_tpu's gaps left out; dtypes of few operators together as "other"."""
    passed, attempted = defaultdict(int), defaultdict(int)
    for row in rows:
        if row.verdict in (Verdict.PASS, Verdict.FAILURE):
            label = f"pass_{column(row)}"
            attempted[label] += 1
            passed[label] += row.verdict is Verdict.PASS
    return {label: passed[label] / attempted[label] for label in attempted}


COLUMNS = ("float32", "bfloat16", "gradient", "other")


def column(row: Row) -> str:
    """The row's place in the table."""
    return row.dtype if row.dtype in COLUMNS else "other"


def counts(rows: Iterable[Row]) -> str:
    """A table of verdicts by dtype."""
    found = defaultdict(int)
    for row in rows:
        found[column(row), row.verdict] += 1
    lines = ["| | pass | torch_tpu's gap | our failure | not sampled |", "|---|---|---|---|---|"]
    order = (Verdict.PASS, Verdict.GAP, Verdict.FAILURE, Verdict.UNSAMPLED)
    for name in COLUMNS:
        lines.append(f"| {name} | " + " | ".join(str(found[name, verdict]) for verdict in order) + " |")
    return "\n".join(lines)


def reasons(rows: Iterable[Row], verdict: Verdict) -> str:
    """A table of the reasons for a verdict, with the operators that have it."""
    found = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.verdict is verdict:
            for reason in row.reasons:
                found[reason][row.operator].append(row.dtype)
    lines = ["| What it says | Operators |", "|---|---|"]
    for reason, operators in sorted(found.items()):
        names = ", ".join(f"{operator} ({', '.join(dtypes)})" for operator, dtypes in sorted(operators.items()))
        lines.append(f"| {_cell(reason)} | {names} |")
    return "\n".join(lines) if found else "None."


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def every(rows: Iterable[Row]) -> str:
    """A table of all operators."""
    cells = defaultdict(dict)
    for row in rows:
        other = f" ({row.dtype})" if column(row) == "other" else ""
        cells[row.operator][column(row)] = row.verdict.value + other
    lines = ["| Operator | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for operator, found in sorted(cells.items()):
        lines.append(f"| {operator} | " + " | ".join(found.get(name, "") for name in COLUMNS) + " |")
    return "\n".join(lines)


def document(rows: list[Row], samples: int, versions: str) -> str:
    """docs/op_conformance.md."""
    operators = len({row.operator for row in rows})
    amount = f"{samples} sample inputs, spread over its own," if samples else "all its sample inputs"
    return f"""# PyTorch's operators on the chip

Written by `python benchmarks/op_conformance.py --table docs/op_conformance.md`; do not edit.

Every one of the {operators} entries of torch's operator database ran with {amount} on an emulated
chip and on the CPU: {versions}. *gradient* is backward in float32; *other* is
the one dtype of an operator that takes neither float32 nor bfloat16. An operator
that draws random numbers is compared by the distribution of its results. A
result is right if it is near the CPU's in the same or in a wider dtype, or no
further from it than a change of the inputs in their last place explains
(benchmarks/op_child.py).

{counts(rows)}

*torch_tpu's gap*: torch_tpu refuses the operation in its own words, its own check
aborts, or what it hands to the plugin is wrong already (evidence in
benchmarks/op_verdicts.py). On a TPU it would be the same. A row is a gap if one of
its samples is.

## Our failures

{reasons(rows, Verdict.FAILURE)}

## torch_tpu's gaps

{reasons(rows, Verdict.GAP)}

## Not sampled

The database has no sample for a machine like this, or the CPU refuses it.

{reasons(rows, Verdict.UNSAMPLED)}

## All operators

{every(rows)}
"""
