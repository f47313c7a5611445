"""Makes llama.npz: weights, tokens, logits and gradients of a tiny Llama, from Hugging Face's PyTorch implementation.

Only needed to make the file again, so its packages are not dependencies of this project:

    pip install torch==2.13.0 transformers numpy
    python tests/golden/make_llama.py

The model has grouped-query attention (4 query heads, 2 key-value heads), an untied head and no biases. Weights
keep PyTorch's names and shapes ([out, in]); the test transposes them.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
  vocab_size=48,
  hidden_size=32,
  intermediate_size=56,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=64,
  rms_norm_eps=1e-5,
  rope_theta=10_000.0,
  tie_word_embeddings=False,
  attn_implementation="eager",
)
model = LlamaForCausalLM(config).to(torch.float32)
with torch.no_grad():
  for name, parameter in model.named_parameters():  # far from initialization, so that attention and norms matter
    noise = torch.randn_like(parameter)
    parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)

tokens = torch.randint(0, config.vocab_size, (3, 17))
logits = model(tokens[:, :-1]).logits
loss = torch.nn.functional.cross_entropy(logits.reshape(-1, config.vocab_size), tokens[:, 1:].reshape(-1))
loss.backward()

arrays = {"tokens": tokens.numpy(), "logits": logits.detach().numpy(), "loss": loss.detach().numpy()}
for name, parameter in model.named_parameters():
  arrays[f"weight/{name}"] = parameter.detach().numpy()
  arrays[f"gradient/{name}"] = parameter.grad.numpy()
np.savez_compressed(Path(__file__).with_name("llama.npz"), **arrays)
print(f"loss {loss.item():.6f}, {len(arrays)} arrays")
