"""The tt.* calls from torch: on the emulated chip, eager and compiled, against torch's own attention on the CPU."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from kernels_replacements import tt_ops

tt_ops.register()
dtype, compiled = getattr(torch, {dtype!r}), {compiled}
torch.manual_seed(0)
pages, kv_heads, size, dim, heads, width = 20, 2, 32, 64, 6, 6
keys, values = (torch.randn(pages, kv_heads, size, dim).to(dtype) for _ in range(2))
table = torch.stack([torch.randperm(pages)[:width] for _ in range(3)])
positions, x = torch.tensor([0, 63, 150]), torch.randn(3, kv_heads, dim).to(dtype)
q, chunk = torch.randn(3, heads, dim).to(dtype), torch.randn(64, heads, dim).to(dtype)


def program(keys, values, q, x, table, positions, chunk, start):
    keys = tt_ops.paged_update_cache(keys, x, table, positions)
    one = tt_ops.paged_attention_decode(q, keys, values, table, positions, 0.2)
    many = tt_ops.chunked_attention(chunk, keys, values, table[:1], start, 0.2)
    near = tt_ops.paged_attention_decode(q, keys, values, table, positions, 0.2, {window})
    within = tt_ops.chunked_attention(chunk, keys, values, table[:1], start, 0.2, {window})
    return keys, one, many, near, within


def attend(q, keys, values, visible):
    return torch.nn.functional.scaled_dot_product_attention(
        q.float().transpose(0, 1), keys.float(), values.float(), visible, scale=0.2, enable_gqa=True
    ).transpose(0, 1)


inputs = [t.to("tpu") for t in (keys, values, q, x, table, positions, chunk, torch.tensor(96))]
result = (torch.compile(program) if compiled else program)(*inputs)
written, one, many, near, within = (t.cpu() for t in result)
for b in range(3):
    keys[table[b, positions[b] // size], :, positions[b] % size] = x[b]
assert torch.equal(written, keys)
held = [[cache[table[b]].transpose(0, 1).flatten(1, 2) for cache in (keys, values)] for b in range(3)]
at = torch.arange(width * size)
limit = 1e-5 if dtype == torch.float32 else 2e-2
for b in range(3):
    expected = attend(q[b : b + 1], *held[b], at[None] <= positions[b])
    torch.testing.assert_close(one[b : b + 1].float(), expected, rtol=limit, atol=limit)
    expected = attend(q[b : b + 1], *held[b], (at[None] <= positions[b]) & (at[None] > positions[b] - {window}))
    torch.testing.assert_close(near[b : b + 1].float(), expected, rtol=limit, atol=limit)
asking = 96 + torch.arange(64)[:, None]
expected = attend(chunk, *held[0], at[None] <= asking)
torch.testing.assert_close(many.float(), expected, rtol=limit, atol=limit)
expected = attend(chunk, *held[0], (at[None] <= asking) & (at[None] > asking - {window}))
torch.testing.assert_close(within.float(), expected, rtol=limit, atol=limit)
"""


@pytest.mark.parametrize(
    ("dtype", "compiled", "window"),
    [("float32", False, 1), ("float32", True, 40), ("bfloat16", False, 40), ("bfloat16", True, 1000)],
)
def test_cache_and_attention(dtype, compiled, window, tmp_path, root):
    """A written row, a decode step and a prefill chunk, with and without a window, are what torch computes."""
    ours = ("LIBTT", "TT_TPU", "TPU", "TORCH")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment = clean | {"LIBTT_TPU_COMPAT": "1", "TT_TPU_CACHE_DIR": str(tmp_path)}
    source = PROGRAM.format(dtype=dtype, compiled=compiled, window=window)
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
