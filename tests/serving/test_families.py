"""Model families: a small random model of each one's real classes says what Hugging Face's says."""

import pytest
import torch
import transformers

TOKENS = 24
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


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_hugging_face(family, serve, tmp_path):
    """Four prompts at once in float32, the longer ones past 16 pages and past the window: all tokens are equal."""
    config_class, further = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**SIZES | further), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # as they are made, a norm's weights do nothing
                parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = tmp_path / family
    model.save_pretrained(folder)
    prompts = [torch.randint(3, VOCABULARY, (length,)).tolist() for length in (20, WINDOW + 37, 520, 700)]
    with serve(folder, "float32", tmp_path, "--page-size", "32", "--skip-tokenizer-init") as server:
        answers = server.generate_all(prompts, TOKENS)
    for prompt, answer in zip(prompts, answers, strict=True):
        said = answer["output_ids"]
        assert len(said) == TOKENS
        with torch.inference_mode():
            best = model(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert said == best.tolist(), f"a prompt of {len(prompt)} tokens"
