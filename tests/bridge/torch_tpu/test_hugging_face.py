"""Hugging Face's Llama and Qwen3, small and with random weights, are on the chip what they are on the CPU."""

import copy

import pytest

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES = ("Llama", "Qwen3")


def pair(torch, family):
    """The same random model on the CPU and on the chip."""
    import transformers

    extra = {"head_dim": 16} if family == "Qwen3" else {}
    config = getattr(transformers, f"{family}Config")(**SIZES, **extra, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    # Larger weights than at the start of a training: the next token is then decided by more than rounding.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model, copy.deepcopy(model).to("tpu")


def tokens(torch, rows=2, length=12):
    return (torch.arange(rows * length).reshape(rows, length) * 7 % 125) + 3


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_backward(torch, family):
    """Logits, loss and every gradient are the CPU's."""
    on_cpu, on_chip = pair(torch, family)
    ids = tokens(torch)
    expected = on_cpu(ids, labels=ids)
    result = on_chip(ids.to("tpu"), labels=ids.to("tpu"))
    torch.testing.assert_close(result.logits.cpu(), expected.logits, rtol=1e-3, atol=1e-3)
    assert result.loss.item() == pytest.approx(expected.loss.item(), rel=1e-4)
    expected.loss.backward()
    result.loss.backward()
    right = dict(on_cpu.named_parameters())
    for name, parameter in on_chip.named_parameters():
        grad = right[name].grad
        assert (parameter.grad.cpu() - grad).norm() <= 1e-3 * grad.norm() + 1e-5, name


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_forward(torch, family):
    """torch.compile of the whole model gives the same logits."""
    on_cpu, on_chip = pair(torch, family)
    ids = tokens(torch)
    with torch.no_grad():
        expected = on_cpu(ids).logits
        result = torch.compile(on_chip)(ids.to("tpu")).logits
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_generate(torch, family):
    """Greedy generation gives the CPU's tokens."""
    on_cpu, on_chip = pair(torch, family)
    ids = tokens(torch, rows=1)
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = on_cpu.generate(ids, **options)
    assert on_chip.generate(ids.to("tpu"), **options).tolist() == expected.tolist()
