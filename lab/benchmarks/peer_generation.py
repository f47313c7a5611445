"""The peer of generation.py: the library `transformers` writes texts with the same model on the same cores.

    python lab/benchmarks/peer_generation.py        # requests on standard input; needs pip install '.[peer]'

It calls `generate` with attention by `sdpa`, which is the default, and with the default cache or a static one. Prompts
of different lengths are padded at the left, as the library's documentation asks for. `torch.compile` is left out: it
takes about a minute for each batch, and was tried once, by hand, on a busy machine, and was not faster.

It imports nothing of this repository, so that any Python with PyTorch can run it. generation_worker.py answers requests
in the same way (`serve`).
"""

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

CACHES: dict[str, dict[str, str]] = {"dynamic": {}, "static": {"cache_implementation": "static"}}


class Marks:
  """A streamer: `generate` calls it with the prompts, and then with the newest tokens of each step."""

  def __init__(self) -> None:
    self.times: list[float] = []
    self.tokens: list[list[int]] = []

  def put(self, tokens: Any) -> None:
    self.tokens.append(tokens.tolist())
    self.times.append(time.perf_counter())

  def end(self) -> None:
    pass


@functools.cache
def model_of(folder: str) -> Any:
  import torch
  from transformers import AutoModelForCausalLM

  torch.set_num_threads(os.cpu_count() or 1)
  model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
  model.generation_config.eos_token_id = None  # no token ends a text
  return model


def padded(prompts: list[list[int]]) -> dict[str, Any]:
  """Prompts as `generate` takes them. Padding is at the left."""
  import torch

  width = max(map(len, prompts))
  mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
  return {
    "input_ids": torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]),
    "attention_mask": mask,
  }


def write(request: dict[str, Any]) -> dict[str, Any]:
  """Continues prompts by `length` tokens each. Returns the tokens, and how long the first and all others took."""
  import torch

  model, given, marks = model_of(request["folder"]), padded(request["prompts"]), Marks()
  with torch.inference_mode():
    start = time.perf_counter()
    model.generate(
      **given,
      **CACHES[request["cache"]],
      max_new_tokens=request["length"],
      do_sample=False,
      pad_token_id=0,
      streamer=marks,
    )
  written = marks.tokens[1:]  # the prompts come first
  return timed(start, marks.times[1:]) | {"tokens": [list(text) for text in zip(*written, strict=True)]}


def logits(request: dict[str, Any]) -> dict[str, Any]:
  """The logits of the token after the first prompt."""
  import torch

  with torch.inference_mode():
    found = model_of(request["folder"])(torch.tensor(request["prompts"][:1])).logits[0, -1]
  versions = {name: metadata.version(name) for name in ("torch", "transformers")}
  return {"logits": found.tolist(), "versions": versions}


def timed(start: float, times: list[float]) -> dict[str, float]:
  """Seconds until the first token, and of each further one."""
  return {"prefill": times[0] - start, "decode": (times[-1] - times[0]) / (len(times) - 1)}


def serve(tasks: dict[str, Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
  """Answers requests, a line of JSON each with the name of its task, until there are no more."""
  for line in sys.stdin:
    request = json.loads(line)
    try:
      result = tasks[request["task"]](request)
    except ModuleNotFoundError as error:
      result = {"error": f"{error.name} is not installed; pip install '.[peer]', or name a Python with --peer-python"}
    except Exception as error:  # ends the benchmark with this sentence
      result = {"error": str(error).strip().partition("\n")[0] or type(error).__name__}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
  serve({"write": write, "logits": logits})
