"""Small programs and arrays for the plugin's tests."""

import array

F32 = 11


def add(n: int) -> str:
    """c = a + b over n floats."""
    kind = f"tensor<{n}xf32>"
    return f"""module @add {{ func.func public @main(%a: {kind}, %b: {kind}) -> {kind} {{
      %0 = stablehlo.add %a, %b : {kind}
      return %0 : {kind} }} }}"""


def increment_in_place(n: int) -> str:
    """a + 1 over n floats, into a's own memory."""
    kind = f"tensor<{n}xf32>"
    return f"""module @increment {{ func.func public @main(%a: {kind} {{tf.aliasing_output = 0 : i32}}) -> {kind} {{
      %0 = stablehlo.constant dense<1.0> : {kind}
      %1 = stablehlo.add %a, %0 : {kind}
      return %1 : {kind} }} }}"""


def floats(client, device, values):
    """A float32 buffer of `values` on `device`."""
    return client.buffer_from_host(array.array("f", values), F32, [len(values)], device)


def read(buffer) -> list[float]:
    """The values of a float32 buffer."""
    return list(array.array("f", bytes(buffer.to_host())))
