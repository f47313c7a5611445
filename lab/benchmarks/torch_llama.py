"""The peer: the same Llama-shaped model in PyTorch (Hugging Face `transformers`), trained on the same shapes.

    echo SPEC | python lab/benchmarks/torch_llama.py        # SPEC as in worker.py; needs pip install '.[peer]'

Sizes, global batch, cross-entropy, AdamW, clipping and precision are the same as ours. On a CPU it runs in float32 on
all cores. On a GPU it has float32 weights and computes in bfloat16. If the specification says `compiled`, torch.compile
compiles the model with its loss; on a CPU this needs a C++ compiler. It imports nothing of this repository, so that any
Python with PyTorch can run it. Tests compare its sizes with our model's. With the task "device" it only reports what it
would run on.
"""

import json
import math
import os
import sys
import time
from importlib import metadata


def llama_config(model: dict, attention: str) -> dict:
  """The fields of `transformers.LlamaConfig` for a config's `model` section."""
  return {
    "vocab_size": model["vocab_size"],
    "hidden_size": model["width"],
    "intermediate_size": model["mlp_width"],
    "num_hidden_layers": model["depth"],
    "num_attention_heads": model["heads"],
    "num_key_value_heads": model["kv_heads"],
    "max_position_embeddings": model["seq_len"],
    "rms_norm_eps": model["norm_eps"],
    "rope_theta": model["rope_base"],
    "tie_word_embeddings": model["tied_embedding"],
    "attention_bias": False,
    "mlp_bias": False,
    "attn_implementation": attention,
    "use_cache": False,
  }


def parameter_count(config: dict) -> int:
  """The number of parameters of a Llama with this config."""
  width, head = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
  attention = width * head * 2 * (config["num_attention_heads"] + config["num_key_value_heads"])
  block = attention + 3 * width * config["intermediate_size"] + 2 * width  # and two norms
  tables = 1 if config["tie_word_embeddings"] else 2
  return config["num_hidden_layers"] * block + tables * config["vocab_size"] * width + width


def measure(spec: dict) -> dict:
  """Seconds of each training step, as worker.py times them."""
  import torch
  from transformers import LlamaConfig, LlamaForCausalLM

  asked = spec["config"]
  optimizer_fields, fields = asked["optimizer"], llama_config(asked["model"], spec["attention"])
  device = "cuda" if torch.cuda.is_available() else "cpu"
  torch.set_num_threads(os.cpu_count() or 1)
  torch.manual_seed(0)
  model = LlamaForCausalLM(LlamaConfig(**fields)).to(device, torch.float32)
  model.train()
  count = sum(p.numel() for p in model.parameters())
  if count != parameter_count(fields):
    raise ValueError(f"the peer has {count} parameters and should have {parameter_count(fields)}")
  decayed = [p for p in model.parameters() if p.ndim > 1]
  others = [p for p in model.parameters() if p.ndim <= 1]
  optimizer = torch.optim.AdamW(
    [
      {"params": decayed, "weight_decay": optimizer_fields["weight_decay"]},
      {"params": others, "weight_decay": 0.0},
    ],
    lr=1e-4,  # does not affect the speed
    betas=(optimizer_fields["b1"], optimizer_fields["b2"]),
    eps=optimizer_fields["eps"],
    fused=True,  # PyTorch's fastest, on CPUs too
  )
  torch.set_float32_matmul_precision("high")  # for what autocast leaves in float32; has no effect on a CPU
  tokens = torch.randint(0, fields["vocab_size"], (asked["batch_size"], asked["model"]["seq_len"] + 1), device=device)
  inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous().flatten()

  def loss_of(inputs: "torch.Tensor", targets: "torch.Tensor") -> "torch.Tensor":
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
      logits = model(input_ids=inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets)

  run = torch.compile(loss_of) if spec["compiled"] else loss_of

  def step() -> "torch.Tensor":
    optimizer.zero_grad(set_to_none=True)
    loss = run(inputs, targets)
    loss.backward()
    if optimizer_fields["clip_norm"]:
      torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer_fields["clip_norm"])
    optimizer.step()
    return loss.detach()

  seconds = []
  for _ in range(spec["warmup"] + spec["steps"]):
    start = time.perf_counter()
    loss = step()
    if device == "cuda":
      torch.cuda.synchronize()
    seconds.append(time.perf_counter() - start)
  if not math.isfinite(loss.item()):
    raise ValueError("the peer's loss is not finite")
  return {
    "seconds": seconds[spec["warmup"] :],
    "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    "versions": versions(),
    "precision": f"{'bfloat16' if device == 'cuda' else 'float32'}, {'compiled' if spec['compiled'] else 'eager'}",
    "parameters": count,
  }


def find_device() -> dict:
  """The device that `measure` uses, "cuda" or "cpu", and the versions."""
  import torch
  import transformers  # noqa: F401  # to find out whether it is there

  return {"device": "cuda" if torch.cuda.is_available() else "cpu", "versions": versions()}


def versions() -> dict:
  return {name: metadata.version(name) for name in ("torch", "transformers")}


def main() -> None:
  spec = json.load(sys.stdin)
  try:
    result = find_device() if spec.get("task") == "device" else measure(spec)
  except ModuleNotFoundError as error:
    result = {"error": f"{error.name} is not installed; pip install '.[peer]', or name a Python with --peer-python"}
  except Exception as error:  # reported in the peer's row of the table
    result = {"error": str(error).strip().partition("\n")[0] or type(error).__name__}
  print(json.dumps(result))


if __name__ == "__main__":
  main()
