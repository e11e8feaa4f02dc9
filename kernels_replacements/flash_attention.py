"""Stands in for torch_tpu's flash attention, a Mosaic kernel that its C++ emits and only a TPU can run.

torch_tpu also has scaled_dot_product_attention as StableHLO, behind another ATen operator.
The flash operator is pointed at that one, for TPU tensors alone: what a user sets with
sdpa_kernel, and attention on the CPU, stay as they are. That StableHLO knows no dropout;
dropout is computed here.
"""

import warnings
from types import ModuleType

# torch's registrations end with the library that made them: this one lives as long as the process.
_library = None


def install(_torch_tpu: ModuleType) -> None:
    """Replace the operator for TPU tensors; to be called once torch_tpu has registered its own."""
    global _library
    import torch

    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # torch says once that an operator was registered before; here that is meant.
        warnings.simplefilter("ignore")
        for name, function in (
            ("_scaled_dot_product_cudnn_attention", _forward),
            ("_scaled_dot_product_cudnn_attention_backward", _backward),
        ):
            _library.impl(name, function, "PrivateUse1", allow_override=True)


def _forward(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False,
    *, scale=None,
):  # fmt: skip
    """ATen's _scaled_dot_product_cudnn_attention: [batch, heads, tokens, dim]; bias is added to the scores."""
    import torch

    if dropout_p > 0.0:
        return _forward_with_dropout(query, key, value, attn_bias, dropout_p, is_causal, scale)
    out, log_sum, *rest = torch.ops.aten._scaled_dot_product_fused_attention_overrideable(
        query, key, value, attn_bias, 0.0, is_causal, return_debug_mask, scale=scale
    )
    # The flash operator's promise, which torch.compile holds it to, is a trailing axis of 1.
    return out, log_sum.unsqueeze(-1), *rest


def _backward(
    grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias,
    cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, *, scale=None,
):  # fmt: skip
    """Gradients of query, key and value."""
    import torch

    if dropout_p > 0.0:
        return _backward_with_dropout(grad_out, query, key, value, attn_bias, philox_seed, dropout_p, is_causal, scale)
    wanted = [True, True, True, False]
    return torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward(
        grad_out, query, key, value, attn_bias, wanted, out, logsumexp.squeeze(-1), cum_seq_q, cum_seq_k,
        max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset, scale=scale,
    )[:3]  # fmt: skip


def _probabilities(query, key, attn_bias, is_causal, scale):
    """Softmax of the scores in float32, [batch, heads, tokens, context], and its logarithmic sum."""
    import torch

    scores = query.float() @ _per_head(key, query).float().transpose(-1, -2) * scale
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~visible, float("-inf"))
    if attn_bias is not None:
        scores = scores + attn_bias
    log_sum = torch.logsumexp(scores, dim=-1, keepdim=True)
    # A row that sees nothing attends to nothing.
    return torch.where(log_sum == float("-inf"), 0.0, torch.exp(scores - log_sum)), log_sum


def _per_head(tensor, query):
    """Keys or values once for each head of the query, which may have more (grouped queries)."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def _kept(seed, shape, dropout_p, like):
    """The mask that `seed` stands for, scaled so that the mean stays: the same in forward and backward.

    Each element's number is mixed with the seed by multiplications and shifts modulo 2**64.
    """
    import math

    import torch

    mixed = torch.arange(math.prod(shape), dtype=torch.int64, device=like.device) + seed
    for factor in (-7046029254386353131, -4265267296055464877):
        mixed = (mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) * factor
    uniform = ((mixed >> 40) & 0xFFFFFF).view(shape)
    return (uniform >= int(dropout_p * (1 << 24))).float() / (1.0 - dropout_p)


def _forward_with_dropout(query, key, value, attn_bias, dropout_p, is_causal, scale):
    import torch

    scale = query.shape[-1] ** -0.5 if scale is None else scale
    probabilities, log_sum = _probabilities(query, key, attn_bias, is_causal, scale)
    seed = torch.randint(1 << 62, (), dtype=torch.int64, device=query.device)
    kept = _kept(seed, probabilities.shape, dropout_p, query)
    out = ((probabilities * kept) @ _per_head(value, query).float()).to(query.dtype)
    nothing = torch.zeros(0, dtype=torch.int64, device=query.device)
    return out, log_sum, nothing, nothing, query.shape[-2], key.shape[-2], seed, seed, nothing


def _backward_with_dropout(grad_out, query, key, value, attn_bias, seed, dropout_p, is_causal, scale):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    probabilities, _ = _probabilities(query, key, attn_bias, is_causal, scale)
    kept = _kept(seed, probabilities.shape, dropout_p, query)
    grad_out = grad_out.float()
    grad_value = (probabilities * kept).transpose(-1, -2) @ grad_out
    grad_probabilities = (grad_out @ _per_head(value, query).float().transpose(-1, -2)) * kept
    mean = (grad_probabilities * probabilities).sum(-1, keepdim=True)
    grad_scores = probabilities * (grad_probabilities - mean) * scale
    grad_query = grad_scores @ _per_head(key, query).float()
    grad_key = grad_scores.transpose(-1, -2) @ query.float()
    return grad_query.to(query.dtype), _summed(grad_key, key), _summed(grad_value, value)


def _summed(gradient, tensor):
    """The gradient of what `_per_head` repeated."""
    batch, heads, tokens, dim = tensor.shape
    return gradient.reshape(batch, heads, -1, tokens, gradient.shape[-1]).sum(2).to(tensor.dtype)
