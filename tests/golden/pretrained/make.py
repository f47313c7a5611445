"""Writes tiny random models of each family, and what the library transformers computes with them.

    pip install torch transformers
    python tests/golden/pretrained/make.py

Each folder is a model folder, with `expected.npz`: tokens, logits, the mean loss of the next tokens, the gradient of
each tensor, and the most likely continuations of prompts. All in float32.
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).parent
SIZES = {
  "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
  "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3 = {
  "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
  "original_max_position_embeddings": 16,
}  # fmt: skip
PROMPTS = (9, 1, 4)  # tokens; each is continued by 12
MODELS = {
  "llama": ("Llama", {"num_hidden_layers": 4, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}),
  "llama3": ("Llama", {"num_attention_heads": 4, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
  "mistral": ("Mistral", {"head_dim": 8, "sliding_window": 48}),
  "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
  "qwen3": ("Qwen3", {"head_dim": 8}),
}


def make(name: str, family: str, fields: dict) -> None:
  torch.manual_seed(0)
  config = getattr(transformers, f"{family}Config")(**(SIZES | fields))
  model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
  for weight in model.parameters():  # biases are 0 and scales 1 at first, and would hide mistakes
    with torch.no_grad():
      weight.add_(0.1 * torch.randn_like(weight))
  tokens = torch.randint(SIZES["vocab_size"], (2, 40))
  logits = model(tokens[:, :-1]).logits
  loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
  loss.backward()
  texts = {}
  for length in PROMPTS:
    prompt = tokens[:1, :length]
    texts[f"text {length}"] = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None).numpy()[0]
  model.save_pretrained(FOLDER / name)
  gradients = {f"gradient {key}": weight.grad.numpy() for key, weight in model.named_parameters()}
  expected = {"tokens": tokens.numpy(), "logits": logits.detach().numpy(), "loss": loss.detach().numpy()}
  np.savez_compressed(FOLDER / name / "expected.npz", **expected, **gradients, **texts)
  print(name, json.dumps({"loss": float(loss), "transformers": transformers.__version__}))


if __name__ == "__main__":
  for name, (family, fields) in MODELS.items():
    make(name, family, fields)
