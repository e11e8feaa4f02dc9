"""A rank's program becomes what libtt wants of a mesh: a manual computation over all chips."""

import pytest
from chip import VERSION, context

from bridge.compiler import module as modules
from bridge.compiler import pipeline
from bridge.compiler.placement import ALONE, Placement
from bridge.errors import CompileError

TWO = Placement(1, 2, (0, 1))
PROGRAM = """module @m { func.func public @main(%x: tensor<4x3xf32>, %s: tensor<f32>) -> (tensor<4x3xf32>, tensor<f32>) {
  %r = "stablehlo.collective_permute"(%x) <{source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>,
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>}> : (tensor<4x3xf32>) -> tensor<4x3xf32>
  return %r, %s : tensor<4x3xf32>, tensor<f32> } }"""
DIVIDED = """module @m { sdy.mesh @mine = <["x"=2]>
  func.func public @main(%x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mine, [{"x"}]>}) -> tensor<4xf32> {
  return %x : tensor<4xf32> } }"""


def rewrite(program: str = PROGRAM, placement: Placement = TWO) -> str:
    return str(modules.parse(context(), pipeline.rewrite(context(), program.encode(), "libtt", VERSION, placement).program))


def test_arguments_and_results_are_those_of_all_ranks():
    """Along the first dimension, one rank's after the other's; a scalar is the same on all."""
    text = rewrite()
    assert '<["chips"=2]>' in text and "mhlo.num_partitions = 2" in text
    assert "@main(%arg0: tensor<8x3xf32>, %arg1: tensor<f32>) -> (tensor<8x3xf32>, tensor<f32>)" in text
    assert 'in_shardings=[<@mesh, [{"chips"}, {}]>, <@mesh, []>]' in text
    assert "(%arg2: tensor<4x3xf32>, %arg3: tensor<f32>)" in text


def test_collectives_of_replicas_are_refused():
    """A mesh of partitions has one replica: their numbers would mean other devices, a replica's id none."""
    replica_id = "module @m { func.func public @main() -> tensor<ui32> { %r = stablehlo.replica_id : tensor<ui32> return %r : tensor<ui32> } }"  # fmt: skip
    for program, named in ((PROGRAM, "collective_permute"), (replica_id, "replica_id")):
        with pytest.raises(CompileError, match=named):
            rewrite(program, Placement(2, 1, (0, 1)))


def test_a_program_that_names_its_mesh_is_left():
    """Its arguments are those of all chips already."""
    text = rewrite(DIVIDED)
    assert "@main(%arg0: tensor<4xf32>" in text and "manual_computation" not in text


def test_a_program_of_one_device_is_left():
    """It needs no mesh."""
    program = "module @m { func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> } }"
    assert "sdy." not in rewrite(program, ALONE)
