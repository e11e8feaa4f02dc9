"""Collectives become calls of handlers, in one chain; what cannot be one is refused by name."""

import re

import pytest
from chip import VERSION, context

from bridge.compiler import module as modules
from bridge.compiler import pipeline
from bridge.compiler.placement import ALONE, Placement, parse
from bridge.errors import CompileError

TWO = Placement(1, 2, (0, 1))
CHANNEL = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>"
ADD = "{ ^bb0(%a: tensor<f32>, %b: tensor<f32>): %s = stablehlo.add %a, %b : tensor<f32> stablehlo.return %s : tensor<f32> }"


def rewrite(program: str, placement: Placement = TWO, backend: str = "emulated") -> tuple[str, int]:
    """The program after the passes, and how many collectives were counted."""
    done = pipeline.rewrite(context(), program.encode(), backend, VERSION, placement)
    return str(modules.parse(context(), done.program)), done.collectives


def reduce(groups: str, body: str = ADD, kind: str = "tensor<4xf32>", operand: str = "%x", result: str = "%r", more: str = "use_global_device_ids") -> str:  # fmt: skip
    attributes = f"replica_groups = dense<{groups}> : tensor<{len(eval(groups))}x{len(eval(groups)[0])}xi64>, {CHANNEL}"
    return f'{result} = "stablehlo.all_reduce"({operand}) <{{{attributes}{", " + more if more else ""}}}> ({body}) : ({kind}) -> {kind}'


def unary(body: str, kind: str = "tensor<4xf32>") -> str:
    return f"module @m {{ func.func public @main(%x: {kind}) -> {kind} {{ {body} return %r : {kind} }} }}"


def calls(text: str) -> list[str]:
    return re.findall(r"custom_call @(tt_tpu\.\w+)", text)


def test_the_calls_form_a_chain():
    """Two collectives that do not depend on each other do so by the value that they pass on."""
    body = reduce("[[0, 1]]", result="%one") + reduce("[[0, 1]]", result="%two") + "%r = stablehlo.add %one, %two : tensor<4xf32>"
    text, count = rewrite(unary(body))
    assert calls(text) == ["tt_tpu.all_reduce"] * 2 and count == 2
    first, second = re.findall(r"%(\w+):2 = stablehlo.custom_call @tt_tpu.all_reduce\(%\w+, (%[\w#]+)\)", text)
    assert second[1] == f"%{first[0]}#1"
    assert text.count("has_side_effect = true") == 2


def test_the_chain_goes_through_a_loop():
    """A collective in a loop's body takes its place between those before and after the loop."""
    loop = f"""%t = stablehlo.constant dense<false> : tensor<i1>
      %w = stablehlo.while(%y = %one) : tensor<4xf32> cond {{ stablehlo.return %t : tensor<i1> }} do {{
      {reduce("[[0, 1]]", operand="%y", result="%z")} stablehlo.return %z : tensor<4xf32> }}"""
    text, _ = rewrite(unary(reduce("[[0, 1]]", result="%one") + loop + reduce("[[0, 1]]", operand="%w")))
    before, inside, after = re.findall(r"@tt_tpu.all_reduce\(%[\w#]+, %([\w#]+)\)", text)
    (loop_name, carried) = re.search(r"%(\w+):2 = stablehlo.while\(%\w+ = %[\w#]+, %(\w+) = ", text).groups()
    assert inside == carried and after == f"{loop_name}#1" and before != after


def test_nothing_of_a_rank_is_in_a_program():
    """partition_id is asked when the program runs."""
    text, count = rewrite(unary("""%p = stablehlo.partition_id : tensor<ui32> %f = stablehlo.convert %p : (tensor<ui32>) -> tensor<f32>
      %b = stablehlo.broadcast_in_dim %f, dims = [] : (tensor<f32>) -> tensor<4xf32> %r = stablehlo.add %x, %b : tensor<4xf32>"""))  # fmt: skip
    assert calls(text) == ["tt_tpu.rank"] and count == 0


@pytest.mark.parametrize("placement", [ALONE, Placement(1, 2, (0, 1))])
def test_a_group_of_one_is_the_identity(placement):
    """A collective whose groups hold one member each is its operand, with or without a mesh."""
    groups = "[[0]]" if placement is ALONE else "[[0], [1]]"
    text, count = rewrite(unary(reduce(groups)), placement)
    assert calls(text) == [] and count == 0 and "all_reduce" not in text


def test_a_chip_that_is_alone_has_no_collectives():
    """Without a mesh a group of two is refused."""
    with pytest.raises(CompileError, match=r"all_reduce .*not part of a mesh"):
        rewrite(unary(reduce("[[0, 1]]")), ALONE)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("{ ^bb0(%a: tensor<f32>, %b: tensor<f32>): %s = stablehlo.subtract %a, %b : tensor<f32> stablehlo.return %s : tensor<f32> }", "subtract"),
        ("{ ^bb0(%a: tensor<f32>, %b: tensor<f32>): %s = stablehlo.add %a, %a : tensor<f32> stablehlo.return %s : tensor<f32> }", "add"),
        ("{ ^bb0(%a: tensor<f32>, %b: tensor<f32>): stablehlo.return %a : tensor<f32> }", "nothing"),
    ],
)  # fmt: skip
def test_a_reduction_that_is_not_known_is_refused(body, named):
    """What a region computes is recognised, or named; never taken for a sum."""
    with pytest.raises(CompileError, match=rf"reduces by \({named}\).*gather the arrays"):
        rewrite(unary(reduce("[[0, 1]]", body)))


def test_an_element_type_that_is_not_known_is_refused():
    """Elements of four bits are named."""
    body = ADD.replace("f32", "i4")
    with pytest.raises(CompileError, match=r"all_reduce of tensor<4xi4>"):
        rewrite(unary(reduce("[[0, 1]]", body, "tensor<4xi4>"), "tensor<4xi4>"))


def test_a_collective_in_a_loops_condition_is_refused():
    """The chain cannot leave a condition."""
    condition = f"""{reduce("[[0, 1]]", operand="%y", result="%z")} %t = stablehlo.constant dense<false> : tensor<i1>
      stablehlo.return %t : tensor<i1>"""
    loop = f"%r = stablehlo.while(%y = %x) : tensor<4xf32> cond {{ {condition} }} do {{ stablehlo.return %y : tensor<4xf32> }}"
    with pytest.raises(CompileError, match="condition of a loop"):
        rewrite(unary(loop))


@pytest.mark.parametrize("mark", ['mhlo.sharding = "{devices=[2]<=[2]}"', "sdy.sharding = #sdy.sharding<@mesh, [{}]>"])
def test_a_program_for_a_partitioner_is_refused(mark):
    """In a mesh of processes nobody divides a program: one that expects it is refused."""
    mesh = 'sdy.mesh @mesh = <["x"=2]>' if "sdy" in mark else ""
    program = f"""module @m {{ {mesh} func.func public @main(%x: tensor<4xf32> {{{mark}}}) -> tensor<4xf32> {{
      return %x : tensor<4xf32> }} }}"""
    with pytest.raises(CompileError, match="has a sharding"):
        rewrite(program)


def test_libtt_has_collectives_of_its_own():
    """For silicon the operations stay as they are, in a mesh."""
    text, _ = rewrite(unary(reduce("[[0, 1]]")), TWO, "libtt")
    assert "stablehlo.all_reduce" in text and calls(text) == []


def test_libtt_alone_has_none():
    """On one chip they are refused for libtt too."""
    with pytest.raises(CompileError, match="not part of a mesh"):
        rewrite(unary(reduce("[[0, 1]]")), ALONE, "libtt")


def test_placements():
    """What the plugin writes of a program's devices is read; what no mesh runs is refused."""
    assert parse("") == ALONE
    assert parse("1 4 3 2 1 0") == Placement(1, 4, (3, 2, 1, 0))
    assert parse("2 1 0 1") == Placement(2, 1, (0, 1))
    with pytest.raises(CompileError, match="2 replicas of 2 partitions on 4 devices"):
        parse("2 2 0 1 2 3")


def test_a_number_that_no_device_has_is_refused():
    """Groups name devices of the program."""
    with pytest.raises(CompileError, match="names device 2 of 2"):
        rewrite(unary(reduce("[[0, 1, 2]]")))
