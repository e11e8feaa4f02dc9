"""What no pass handles is refused with its name, its shapes and what to do."""

import pytest
from jaxlib.mlir import ir

from bridge.compiler import module as modules
from bridge.compiler.fail_closed import fail_closed
from bridge.errors import CompileError

KNOWN = frozenset(("TopK",))
GROUPS = "replica_groups = dense<0> : tensor<1x1xi64>"
COLLECTIVES = {
    "all_gather": f'"stablehlo.all_gather"(%x) <{{all_gather_dim = 0 : i64, {GROUPS}}}>',
    "all_to_all": '"stablehlo.all_to_all"(%x) <{split_dimension = 0 : i64, concat_dimension = 0 : i64,'
    f" split_count = 1 : i64, {GROUPS}}}>",
    "collective_permute": '"stablehlo.collective_permute"(%x)'
    " <{source_target_pairs = dense<0> : tensor<1x2xi64>}>",
    "collective_broadcast": f'"stablehlo.collective_broadcast"(%x) <{{{GROUPS}}}>',
    "all_reduce": f'"stablehlo.all_reduce"(%x) <{{{GROUPS}}}> ({{ ^bb0(%a: tensor<f32>, %b: tensor<f32>):'
    " %s = stablehlo.add %a, %b : tensor<f32> stablehlo.return %s : tensor<f32> })",
    "reduce_scatter": f'"stablehlo.reduce_scatter"(%x) <{{scatter_dimension = 0 : i64, {GROUPS}}}> ({{'
    " ^bb0(%a: tensor<f32>, %b: tensor<f32>): %s = stablehlo.add %a, %b : tensor<f32>"
    " stablehlo.return %s : tensor<f32> })",
}


def check(operation: str, inside_while: bool = False) -> None:
    text = f"%r = {operation} : (tensor<4xf32>) -> tensor<4xf32>"
    if inside_while:
        text = f"""%r = stablehlo.while(%y = %x) : tensor<4xf32> cond {{
            %t = stablehlo.constant dense<false> : tensor<i1> stablehlo.return %t : tensor<i1> }} do {{
            %z = {operation.replace("%x", "%y")} : (tensor<4xf32>) -> tensor<4xf32>
            stablehlo.return %z : tensor<4xf32> }}"""
    source = f"func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {{ {text} return %r : tensor<4xf32> }}"
    fail_closed(ir.Module.parse(source, modules.make_context()), KNOWN)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_refused(name):
    """XLA's CPU compiler would make it the identity; the error names the operation and its types."""
    with pytest.raises(CompileError, match=rf"stablehlo\.{name} \(tensor<4xf32>\) -> tensor<4xf32>.*one chip"):
        check(COLLECTIVES[name])


def test_a_collective_inside_a_loop_is_refused():
    """Nested regions are searched too."""
    with pytest.raises(CompileError, match="all_gather"):
        check(COLLECTIVES["all_gather"], inside_while=True)


def test_a_mosaic_kernel_is_refused_by_its_name():
    """The error says which kernel it was and what can stand in for it."""
    call = 'stablehlo.custom_call @tpu_custom_call(%x) {backend_config = "", kernel_name = "ragged_paged_attention"}'
    with pytest.raises(CompileError, match=r"'ragged_paged_attention'.*tensor<4xf32>.*kernels_replacements"):
        check(call)


def test_an_unknown_custom_call_is_refused():
    """The target's name and types are in the message."""
    with pytest.raises(CompileError, match=r"'tt\.no_such_call' \(tensor<4xf32>\) -> tensor<4xf32>"):
        check("stablehlo.custom_call @tt.no_such_call(%x)")


@pytest.mark.parametrize("target", ["TopK", "Sharding", "xla.sdy.FuncResultSharding"])
def test_known_custom_calls_pass(target):
    """What the inner plugin handles, and annotations of the partitioner, are left alone."""
    check(f"stablehlo.custom_call @{target}(%x)")
