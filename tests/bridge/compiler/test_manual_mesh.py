"""A rank's program becomes what libtt wants of a mesh: a manual computation over all chips."""

import pytest
from chip import VERSION, context

from bridge.compiler import module as modules
from bridge.compiler import pipeline
from bridge.compiler.placement import ALONE, Placement
from bridge.errors import CompileError

TWO = Placement(2, 1, (0, 1))
PROGRAM = """module @m {{ func.func public @main(%x: tensor<4x3xf32>, %s: tensor<f32>) -> (tensor<4x3xf32>, tensor<f32>) {{
  %r = "stablehlo.collective_permute"(%x) <{{source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>{channel}}}>
    : (tensor<4x3xf32>) -> tensor<4x3xf32>
  return %r, %s : tensor<4x3xf32>, tensor<f32> }} }}"""
CHANNEL = ", channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>"


def rewrite(channel: str = "", placement: Placement = TWO) -> str:
    program = PROGRAM.format(channel=channel).encode()
    return str(modules.parse(context(), pipeline.rewrite(context(), program, "libtt", VERSION, placement).program))


def test_arguments_and_results_are_those_of_all_ranks():
    """Along the first dimension, one rank's after the other's; a scalar is the same on all."""
    text = rewrite()
    assert '<["chips"=2]>' in text and "mhlo.num_partitions = 2" in text
    assert "@main(%arg0: tensor<8x3xf32>, %arg1: tensor<f32>) -> (tensor<8x3xf32>, tensor<f32>)" in text
    assert 'in_shardings=[<@mesh, [{"chips"}, {}]>, <@mesh, []>]' in text
    assert "(%arg2: tensor<4x3xf32>, %arg3: tensor<f32>)" in text


def test_collectives_of_replicas_become_those_of_partitions():
    """A channel says that a collective's numbers are partitions', which are the same devices."""
    assert "channel_handle" in rewrite()


def test_a_count_without_a_word_for_it_is_refused():
    """In a program of replicas a channel means partitions, of which there is one: nothing to present."""
    with pytest.raises(CompileError, match="collective_permute"):
        rewrite(CHANNEL)


def test_a_program_of_one_device_is_left():
    """It needs no mesh."""
    program = b"module @m { func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> } }"
    text = str(modules.parse(context(), pipeline.rewrite(context(), program, "libtt", VERSION, ALONE).program))
    assert "sdy." not in text
