"""A random model as small as vLLM's attention on CPU takes it."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


def keep_weights(layer, remove_weight):
    """Stand in for vLLM's `dispatch_cpu_unquantized_gemm`, which packs weights so that a second set cannot be loaded."""
    layer.cpu_linear = torch.nn.functional.linear


def write_model(folder, tokenizer):
    """Save a random Qwen2 with a tokenizer."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
