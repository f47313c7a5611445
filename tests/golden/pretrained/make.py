"""Writes tiny random models of each family, and what the library transformers computes with them.

    pip install torch transformers
    python tests/golden/pretrained/make.py [NAME ...]

Each folder is a model folder, with `expected.npz`: tokens, logits, the mean loss of the next tokens, the gradient of
each tensor, and the most likely continuations of prompts. Of a mixture of experts also what its balance loss adds to
the loss of the first text, if each block has one: the mean over blocks. All in float32.

The folder `evaluate` holds a tokenizer, questions and texts, and in `NAME.json` what the model in `NAME` makes of
them: scores of the choices, as lm-evaluation-harness computes them, and the log-likelihood of each text, in pieces of
PIECE tokens that each begin with the last token of the piece before.
"""

import json
import sys
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

FOLDER = Path(__file__).parent
SIZES = {
  "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
  "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "router_aux_loss_coef": 0.02}
LLAMA3 = {
  "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
  "original_max_position_embeddings": 16,
}  # fmt: skip
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "num_hidden_layers": 3}
NO_PADDING = {"pad_token_id": None}  # a token that pads has no gradient in the embedding
PROMPTS = (9, 1, 4)  # tokens; each is continued by 12
LOCAL, GLOBAL = "sliding_attention", "full_attention"
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
GPT_OSS = (
  SMALL
  | NO_PADDING
  | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 6, "router_aux_loss_coef": 0.02}
  | {"swiglu_limit": 7.0, "rope_parameters": YARN | {"truncate": False}, "attn_implementation": "eager"}
)
MODELS = {
  "llama": ("Llama", {"num_hidden_layers": 4, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}),
  "llama3": ("Llama", {"num_attention_heads": 4, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
  "mistral": ("Mistral", {"head_dim": 8, "sliding_window": 48}),
  "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
  "qwen3": ("Qwen3", {"head_dim": 8}),
  # Only the last layer has the window; and the first and the last.
  "qwen2_window": ("Qwen2", SMALL | {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 2}),
  "qwen3_window": (
    "Qwen3",
    SMALL
    | {"head_dim": 8, "use_sliding_window": True, "sliding_window": 48}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
  ),
  # Texts of 39 tokens are longer than these windows.
  "mistral_local": ("Mistral", SMALL | {"sliding_window": 7}),
  "qwen3_local": (
    "Qwen3",
    SMALL | {"head_dim": 8, "use_sliding_window": True, "sliding_window": 9} | {"layer_types": [LOCAL, GLOBAL, LOCAL]},
  ),
  "gemma3": (
    "Gemma3Text",
    SMALL
    | NO_PADDING
    | {"num_hidden_layers": 5, "num_key_value_heads": 1, "head_dim": 8, "query_pre_attn_scalar": 5}
    | {"sliding_window": 6, "layer_types": [LOCAL, LOCAL, GLOBAL, LOCAL, LOCAL], "tie_word_embeddings": True}
    | {
      "rope_parameters": {
        LOCAL: {"rope_type": "default", "rope_theta": 100.0},
        GLOBAL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
      }
    },
  ),
  "olmo2": (
    "Olmo2",
    SMALL | {"num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
  ),
  "olmo3": (
    "Olmo3",
    SMALL
    | NO_PADDING
    | {"num_hidden_layers": 4, "sliding_window": 6}
    | {"rope_parameters": {LOCAL: PLAIN, GLOBAL: YARN}},
  ),
  "smollm3": ("SmolLM3", SMALL | NO_PADDING | {"num_hidden_layers": 4, "rope_parameters": PLAIN}),
  "gpt_oss": ("GptOss", GPT_OSS),
  # Its experts are stored in four bits each. Weights are made of random bits, in blocks of 32.
  "gpt_oss_mxfp4": (
    "GptOss",
    GPT_OSS | {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_local_experts": 2},
  ),
  "llama_untied": ("Llama", SMALL | {"num_hidden_layers": 1}),
  "mixtral": ("Mixtral", EXPERTS | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 48}),
  "qwen3_moe": (
    "Qwen3Moe",
    EXPERTS
    | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "norm_topk_prob": True, "head_dim": 8},
  ),
  "qwen3_moe_dense": (  # the first layers have no experts
    "Qwen3Moe",
    EXPERTS
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True, "head_dim": 8}
    | {"num_hidden_layers": 3, "mlp_only_layers": [0, 1], "intermediate_size": 20},
  ),
  "qwen3_moe_every_second": (  # every second layer has experts
    "Qwen3Moe",
    EXPERTS
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True, "head_dim": 8}
    | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "intermediate_size": 20},
  ),
  "qwen3_moe_unnormed": (
    "Qwen3Moe",
    EXPERTS | {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
  ),
}
# What is changed in config.json. The library then says that the head is not the embedding, and uses both.
CHANGED = {"llama_untied": {"tie_word_embeddings": True}}


def make(name: str, family: str, fields: dict) -> None:
  torch.manual_seed(0)
  config = getattr(transformers, f"{family}Config")(**(SIZES | fields))
  model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
  for weight in model.parameters():  # biases are 0 and scales 1 at first, and would hide mistakes
    with torch.no_grad():
      weight.add_(0.1 * torch.randn_like(weight))
  packed = pack(model) if "mxfp4" in name else {}
  model.save_pretrained(FOLDER / name)
  if packed:
    file = FOLDER / name / "model.safetensors"
    plain = {key: tensor for key, tensor in load_file(file).items() if f"{key}_blocks" not in packed}
    save_file(plain | packed, file, {"format": "pt"})
    file = FOLDER / name / "config.json"
    quantized = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | quantized, indent=2) + "\n")
  if name in CHANGED:
    file = FOLDER / name / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | CHANGED[name], indent=2) + "\n")
    model = getattr(transformers, f"{family}ForCausalLM").from_pretrained(FOLDER / name).eval()
  tokens = torch.randint(SIZES["vocab_size"], (2, 40))
  logits = model(tokens[:, :-1]).logits
  loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
  loss.backward()
  texts = {}
  for length in PROMPTS:
    prompt = tokens[:1, :length]
    texts[f"text {length}"] = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None).numpy()[0]
  # In memory all experts of a layer are one tensor. In files each has tensors of its own.
  named = revert_weight_conversion(model, {key: weight.grad for key, weight in model.named_parameters()})
  gradients = {f"gradient {key}": gradient.numpy() for key, gradient in named.items()}
  expected = {"tokens": tokens.numpy(), "logits": logits.detach().numpy(), "loss": loss.detach().numpy()}
  if hasattr(config, "router_aux_loss_coef"):
    scores = model(tokens[:1, :-1], output_router_logits=True).router_logits
    of_block = sys.modules[type(model).__module__].load_balancing_loss_func
    losses = [of_block((block,), model.num_experts, config.num_experts_per_tok).item() for block in scores]
    expected["balance"] = np.array(config.router_aux_loss_coef * np.mean(losses))
  np.savez_compressed(FOLDER / name / "expected.npz", **expected, **gradients, **texts)
  print(name, json.dumps({"loss": float(loss), "transformers": transformers.__version__}))


def pack(model: torch.nn.Module) -> dict[str, torch.Tensor]:
  """Gives the experts weights that four bits each can say. Returns them as they are stored."""
  packed = {}
  for key, weight in model.named_parameters():
    if key.endswith(("gate_up_proj", "down_proj")):
      experts, inputs, outputs = weight.shape
      blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
      scales = torch.randint(122, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
      with torch.no_grad():
        weight.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
      packed |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
  return packed


# What the config.json files of published models say, but for what does not change what a model computes.
LINEAR, YARN_8 = {"rope_type": "linear", "factor": 8.0}, {
  "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2079441541679836,
  "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
GPT_OSS_20B = {
  "model_type": "gpt_oss", "vocab_size": 201088, "head_dim": 64, "sliding_window": 128, "num_local_experts": 32,
  "num_experts_per_tok": 4, "attention_bias": True, "experts_per_token": 4, "initial_context_length": 4096,
  "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "swiglu_limit": 7.0,
  "tie_word_embeddings": False, "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
  "num_key_value_heads": 8, "intermediate_size": 2880,
  "rope_scaling": {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
  },
}  # fmt: skip
GEMMA = {
  "model_type": "gemma3_text", "head_dim": 256, "query_pre_attn_scalar": 256, "rope_theta": 1000000.0,
  "rope_local_base_freq": 10000.0, "rms_norm_eps": 1e-06, "hidden_activation": "gelu_pytorch_tanh",
  "sliding_window": 1024, "sliding_window_pattern": 6, "vocab_size": 262208, "rope_scaling": LINEAR,
}  # fmt: skip
OLMO = {
  "model_type": "olmo3", "vocab_size": 100278, "sliding_window": 4096, "rope_theta": 500000, "rope_scaling": YARN_8,
  "max_position_embeddings": 65536, "rms_norm_eps": 1e-06, "tie_word_embeddings": False,
}  # fmt: skip
NAMES = (
  "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
)  # fmt: skip
PUBLISHED = {
  "Gemma 3 1B": GEMMA
  | dict(zip(NAMES, (1152, 26, 4, 1, 6912), strict=True))
  | {"sliding_window": 512, "vocab_size": 262144, "rope_scaling": None},
  "Gemma 3 4B": GEMMA | dict(zip(NAMES, (2560, 34, 8, 4, 10240), strict=True)),
  "Gemma 3 27B": GEMMA
  | dict(zip(NAMES, (5376, 62, 32, 16, 21504), strict=True))
  | {"head_dim": 128, "query_pre_attn_scalar": 168},
  "gpt-oss 20B": GPT_OSS_20B,
  "gpt-oss 120B": GPT_OSS_20B | {"num_hidden_layers": 36, "num_local_experts": 128},
  "OLMo 2 7B": {
    "model_type": "olmo2", "vocab_size": 100352, "rope_theta": 500000, "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False, **dict(zip(NAMES, (4096, 32, 32, 32, 11008), strict=True)),
  },
  "OLMo 3 7B": OLMO | dict(zip(NAMES, (4096, 32, 32, 32, 11008), strict=True)),
  "OLMo 3 32B": OLMO | dict(zip(NAMES, (5120, 64, 40, 8, 27648), strict=True)),
  "SmolLM3 3B": {
    "model_type": "smollm3", "vocab_size": 128256, "rope_theta": 5000000.0, "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True, "no_rope_layer_interval": 4,
    **dict(zip(NAMES, (2048, 36, 16, 4, 11008), strict=True)),
  },
}  # fmt: skip


def count_published() -> None:
  """Writes published.json: these files, and how many parameters the library gives such a model."""
  found = {}
  for name, fields in PUBLISHED.items():
    config = transformers.AutoConfig.for_model(**fields)
    with torch.device("meta"):
      model = transformers.AutoModelForCausalLM.from_config(config)
    found[name] = {"config": fields, "parameters": model.num_parameters()}
  (FOLDER / "published.json").write_text(json.dumps(found, indent=1) + "\n")


QUESTIONS = (
  ("the cat sat on", ["the mat", "a dog that ran", "mats"], 1),
  ("a man and a woman ran to", ["it", "the river and then to the road", "the road"], "B"),
  ("so what did the dog eat? ", ["an ant", "a cat, a rat and some more rats", "it ate so"], "it ate so"),
  ("", ["some words", "others"], 1),
  ("who", ["ever", "is it", "dares to stand on the mat at the end of the road?"], "A"),
  ("one and one more", ["is two", "is ten", "was a red cat", "is another red hat"], 0),
)  # fmt: skip
TEXTS = (
  "the cat sat on the mat, and then it ran to the road.", "so it is", "a man is there; who is he?", "is it?",
  "one man and one woman are two, so two men and two women are more than two; "
  "ten cats are more than ten rats, and the rats ran to the river",
)  # fmt: skip
PIECE = 32


def make_tokenizer(folder: Path) -> transformers.PreTrainedTokenizerFast:
  """A BPE that begins a word with the space before it, and puts <s> in front of texts, as that of Llama 2."""
  made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
  made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
  special = ["<unk>", "<s>", "</s>"]
  trainer = tokenizers.trainers.BpeTrainer(vocab_size=SIZES["vocab_size"], special_tokens=special, show_progress=False)
  made.train_from_iterator([*TEXTS, *(question for question, *_ in QUESTIONS)], trainer)
  made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
  made.save(str(folder / "tokenizer.json"), pretty=False)
  return transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def evaluate(folder: Path, name: str) -> None:
  folder.mkdir(exist_ok=True)
  tokenizer = make_tokenizer(folder)
  model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float32).eval()

  def log_likelihoods(ids: list[int]) -> np.ndarray:
    """The log-likelihood of each token after the first."""
    logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]].detach().numpy()

  scores, texts, lines = [], [], []
  for question, choices, answer in QUESTIONS:
    join = "" if not question or question[-1] == " " else " "
    before = len(tokenizer(question.rstrip())["input_ids"]) - 1
    wholes = [tokenizer(question + join + choice)["input_ids"] for choice in choices]
    scores.append([float(log_likelihoods(ids)[before:].sum()) for ids in wholes])
    lines.append({"question": question, "choices": choices, "answer": answer})
  for text in TEXTS:
    ids = tokenizer(text)["input_ids"]
    pieces = [log_likelihoods(ids[at : at + PIECE + 1]) for at in range(0, len(ids) - 1, PIECE)]
    texts.append((sum(float(piece.sum()) for piece in pieces), sum(map(len, pieces))))
  expected = {"scores": scores, "texts": [found for found, _ in texts], "tokens": [count for _, count in texts]}
  (folder / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  (folder / "texts.jsonl").write_text("".join(json.dumps({"content": text}) + "\n" for text in TEXTS))
  (folder / f"{name}.json").write_text(json.dumps(expected, indent=1) + "\n")
  print("evaluate", json.dumps(expected))


if __name__ == "__main__":
  count_published()
  for name in sys.argv[1:] or MODELS:
    make(name, *MODELS[name])
    if name in ("llama", "mixtral"):
      evaluate(FOLDER / "evaluate", name)
