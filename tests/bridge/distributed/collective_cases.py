"""Collectives as text of StableHLO, and what each rank must get, computed by numpy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from plain_arrays import ELEMENTS

_REDUCERS = {
    "sum": ("add", np.add), "product": ("multiply", np.multiply), "minimum": ("minimum", np.minimum),
    "maximum": ("maximum", np.maximum), "and": ("and", np.bitwise_and), "or": ("or", np.bitwise_or),
    "xor": ("xor", np.bitwise_xor),
}  # fmt: skip
CHANNEL = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>"


@dataclass(frozen=True)
class Case:
    """One collective.

    Attributes:
        op: its name in StableHLO.
        shape, element: of every rank's operand.
        groups: of ranks.
        reduction: of all_reduce and reduce_scatter.
        axis: of all_gather and reduce_scatter; split of all_to_all.
        concat: of all_to_all.
        pairs: source and target of collective_permute.
    """

    op: str
    shape: tuple[int, ...]
    element: str = "f32"
    groups: tuple[tuple[int, ...], ...] = ()
    reduction: str = "sum"
    axis: int = 0
    concat: int = 0
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Of every rank's result."""
        shape = list(self.shape)
        size = len(self.groups[0]) if self.groups else 1
        if self.op == "all_gather":
            shape[self.axis] *= size
        elif self.op == "reduce_scatter":
            shape[self.axis] //= size
        elif self.op == "all_to_all":
            shape[self.axis] //= size
            shape[self.concat] *= size
        return tuple(shape)

    def text(self, operand: str, result: str) -> str:
        """The operation, from value `operand` to value `result`."""
        attributes, region = [CHANNEL], ""
        if self.op == "collective_permute":
            attributes.append(f"source_target_pairs = {table(self.pairs)}")
        else:
            attributes.append(f"replica_groups = {table(self.groups)}")
        if self.op in ("all_reduce", "all_gather", "reduce_scatter"):
            attributes.append("use_global_device_ids")
        if self.op in ("all_reduce", "reduce_scatter"):
            region = f" ({self._region()})"
        if self.op == "all_gather":
            attributes.append(f"all_gather_dim = {self.axis} : i64")
        if self.op == "reduce_scatter":
            attributes.append(f"scatter_dimension = {self.axis} : i64")
        if self.op == "all_to_all":
            dimensions = f"split_dimension = {self.axis} : i64, concat_dimension = {self.concat} : i64"
            attributes.append(f"{dimensions}, split_count = {len(self.groups[0])} : i64")
        kinds = f"({kind(self.shape, self.element)}) -> {kind(self.result_shape, self.element)}"
        return f'{result} = "stablehlo.{self.op}"({operand}) <{{{", ".join(attributes)}}}>{region} : {kinds}'

    def _region(self) -> str:
        scalar = kind((), self.element)
        name = _REDUCERS[self.reduction][0]
        return f"{{ ^bb0(%a: {scalar}, %b: {scalar}): %c = stablehlo.{name} %a, %b : {scalar} stablehlo.return %c : {scalar} }}"

    def inputs(self, world: int, seed: int) -> list[np.ndarray]:
        """Each rank's operand: small whole numbers, so that no order of a sum rounds."""
        random = np.random.default_rng(seed)
        most = {"i1": 2, "product": 3}.get(self.element if self.element == "i1" else self.reduction, 8)
        return [random.integers(0, most, self.shape).astype(ELEMENTS[self.element][0]) for _ in range(world)]

    def expected(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Each rank's result."""
        results: list = [np.zeros(self.result_shape, inputs[0].dtype) for _ in inputs]
        for source, target in self.pairs:
            results[target] = inputs[source]
        for group in self.groups:
            for position, rank in enumerate(group):
                results[rank] = self._of_group([inputs[member] for member in group], position)
        return results

    def _of_group(self, inputs: list[np.ndarray], position: int) -> np.ndarray:
        if self.op == "collective_broadcast":
            return inputs[0]
        if self.op == "all_gather":
            return np.concatenate(inputs, self.axis)
        if self.op == "all_to_all":
            return np.concatenate([np.split(x, len(inputs), self.axis)[position] for x in inputs], self.concat)
        total = inputs[0]
        for each in inputs[1:]:
            total = _REDUCERS[self.reduction][1](total, each)
        return total if self.op == "all_reduce" else np.split(total, len(inputs), self.axis)[position]

    def of(self, **changes) -> "Case":
        """The same with other fields."""
        return replace(self, **changes)


def kind(shape: Sequence[int], element: str) -> str:
    """"tensor<2x3xf32>"."""
    return f"tensor<{''.join(f'{size}x' for size in shape)}{element}>"


def table(rows: Sequence[Sequence[int]]) -> str:
    """A dense attribute of integers."""
    return f"dense<{[list(row) for row in rows]}> : tensor<{len(rows)}x{len(rows[0])}xi64>"


def program(cases: Sequence[Case], name: str = "collectives") -> str:
    """A module whose @main takes one operand a case, and returns one result a case."""
    arguments = ", ".join(f"%x{i}: {kind(case.shape, case.element)}" for i, case in enumerate(cases))
    results = ", ".join(kind(case.result_shape, case.element) for case in cases)
    body = "\n".join(case.text(f"%x{i}", f"%y{i}") for i, case in enumerate(cases))
    values = ", ".join(f"%y{i}" for i in range(len(cases)))
    return f"module @{name} {{ func.func public @main({arguments}) -> ({results}) {{\n{body}\nreturn {values} : {results} }} }}"
