"""Small random models of real classes, and what Hugging Face says of a greedy answer."""

from pathlib import Path

import torch
import transformers

VOCABULARY = 500
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    # Else all logits are about the same.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 96
FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 64}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None, "head_dim": 64}),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {"head_dim": 64, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "cohere": (transformers.CohereConfig, {}),
}


def make(family: str, folder: Path, **sizes: int) -> torch.nn.Module:
    """A random float32 model of a family, saved in `folder`; `sizes` change those of its configuration."""
    config_class, further = FAMILIES[family]
    torch.manual_seed(0)
    config = config_class(**SIZES | further | sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # as they are made, a norm's weights do nothing
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def prompt(length: int) -> list[int]:
    """Random tokens, none of them special."""
    return torch.randint(3, VOCABULARY, (length,)).tolist()


def best_tokens(model: torch.nn.Module, prompt: list[int], said: list[int]) -> list[int]:
    """What the model holds for best at each place of an answer."""
    with torch.inference_mode():
        return model(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
