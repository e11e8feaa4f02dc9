"""A failure counts as torch_tpu's only with evidence; everything else counts as ours."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from op_verdicts import Row, Sample, Verdict, judge, ratios  # noqa: E402

STACK = """F0000 00:00:1.5 7 scatter.cc:154] Check failed: a == b (2 vs. 1)
*** Check failure stack trace: ***
    @     0x7f89454b1974  absl::lts_20260526::log_internal::LogMessage::Flush()
    @     0x7f893f283207  {frame}()
"""
FAILED_LATER = "RuntimeError: a required argument is in a failed state"
PLUGIN = "failed to compile MLIR module -- the XLA compiler failed with: custom call 'x' is unknown to this chip"


def abort(frame):
    log = STACK.format(frame=frame)
    return Sample("abort", log.splitlines()[0], log)


@pytest.mark.parametrize(
    ("sample", "verdict"),
    (
        (Sample("pass"), Verdict.PASS),
        (Sample("unsampled", "no GPU"), Verdict.UNSAMPLED),
        (Sample("mismatch", "1 of 2 elements, 1.0 instead of 2.0"), Verdict.FAILURE),
        (Sample("timeout"), Verdict.FAILURE),
        (Sample("error", "RuntimeError: operator 'aten::x' is not implemented for TPU. Please file"), Verdict.GAP),
        (Sample("error", "NotImplementedError: mm(): not implemented for int64"), Verdict.GAP),
        (Sample("error", f"NotImplementedError: {PLUGIN}"), Verdict.FAILURE),
        (Sample("error", f"NotImplementedError: x(): {PLUGIN}"), Verdict.FAILURE),
        (Sample("error", FAILED_LATER, f"] ExecutionTask failed: UNIMPLEMENTED: {PLUGIN}\n"), Verdict.FAILURE),
        (Sample("error", FAILED_LATER), Verdict.FAILURE),
        (Sample("error", "KeyError: 'x'"), Verdict.FAILURE),
        (abort("torch_tpu::BuildScatterShlo"), Verdict.GAP),
        (abort("xla::cpu::Compile"), Verdict.FAILURE),
        (Sample("abort", "Segmentation fault"), Verdict.FAILURE),
        (Sample("abort", "LLVM ERROR: Failed to infer result type(s):"), Verdict.GAP),
    ),
    ids=lambda value: value.detail[:40] or value.kind if isinstance(value, Sample) else value.value,
)
def test_whose_fault(sample, verdict):
    """The verdict follows from the words and from where an abort was."""
    assert judge("add", "float32", sample)[0] is verdict


def test_a_known_wrong_result_is_only_known_as_it_was_seen():
    """Another difference of the same operator counts as ours."""
    seen = Sample("mismatch", "0 results instead of 1")
    assert judge("nn_functional_avg_pool1d", "gradient", seen)[0] is Verdict.GAP
    assert judge("nn_functional_avg_pool1d", "float32", seen)[0] is Verdict.FAILURE
    other = Sample("mismatch", "3 of 4 elements, 1.0 instead of 2.0")
    assert judge("nn_functional_avg_pool1d", "gradient", other)[0] is Verdict.FAILURE


def test_ratios_leave_gaps_out():
    """Passed over attempted: a gap is not attempted, a row with any failure of ours has failed."""
    gap, failure = Sample("error", "x is not implemented for TPU"), Sample("timeout")
    rows = [
        Row("a", "float32", (Sample("pass"),)),
        Row("b", "float32", (Sample("pass"), gap)),
        Row("c", "float32", (Sample("pass"), gap, failure)),
        Row("d", "int64", (Sample("pass"),)),
    ]
    assert ratios(rows) == {"pass_float32": 0.5, "pass_other": 1.0}
