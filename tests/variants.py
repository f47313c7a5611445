"""The programs that tests of all strategies share: test_parity.py runs their steps, test_communication.py reads them.

Both take the same sizes, so the cache has a step that one of them has compiled when the other one needs it.
"""

import functools

from helpers import IMAGES, config, each_once, strategy

import strategies
from strategies import Strategy
from training import settings
from training.program import Program

STEPS = 20
# The least multiple of every strategy's devices × microbatches. A pipeline's devices then have one example at a time.
# Then different arrays often have equal sizes, and telling them apart by shape is hardest.
BATCH = 16
MICROBATCHES = {"pipeline__microbatches": 4}
# Without clipping, Adam's first moment after one step is (1 − b1) times the gradient. No other dimension is 96.
SMALL = {"model__mlp_width": 64, "model__vocab_size": 96, "model__seq_len": 16, "optimizer__clip_norm": 0.0}
# Adam divides a gradient by its own size. So with its usual eps of 1e-8, a gradient of 1e-8, which is nothing but
# rounding errors here, moves its weight as far as any other one, up or down, as the machine's products round.
SMALL["optimizer__eps"] = 1e-6

ACCUMULATION = "text, accumulated, remat"
MIXTURE = "experts"
DOCUMENTS = "documents with prompts, tied, remat dots"
ADAPTED = "adapters, accumulated, remat"
MUON = "tied, saved by name, blocks, muon"
ADAFACTOR = "images, adafactor"
NUMBERS = "features, regression"
RECURRENT = "recurrence, documents, saved by name"
# What Qwen's and Llama 3's models add. The rotations of 2 pairs: one that stays, and one that is slowed down in part.
FAMILIES = {"model__qkv_bias": True, "model__qk_norm": True, "model__rope_scaling": (8.0, 0.01, 1.0, 16)}
ACCUMULATED = {"accumulation": 2, "model__remat": "full"}
# What is kept on the host, and what is saved by name.
KEPT = {"optimizer__on_host": True, "model__remat": "offload", "model__saved": "query,attended,mlp_up"}
ADAPTERS = {"model__lora_rank": 4, "init_from": "a model"}
# Every option is in some variant: dropout, accumulation, remat, packed documents, prompts, a tied embedding,
# augmentation, the host's memory, biases. With 112 positions blockwise attention skips what a block of queries cannot
# see. The last two have optimizers that send something of their own; test_optimizers.py runs those.
VARIANTS = {
  "text": {"model__dropout": 0.1},
  ACCUMULATION: {"model__dropout": 0.1, "model__loss_chunk": 8, **ACCUMULATED},
  DOCUMENTS: {
    "data__packing": "documents",
    "data__prompt_field": "prompt",
    "model__tied_embedding": True,
    "model__remat": "dots",
    **FAMILIES,
  },
  ADAPTED: {**ADAPTERS, "model__lora_alpha": 4.0, **ACCUMULATED},
  "images": {
    **IMAGES,
    "model__dropout": 0.1,
    "model__mlp_width": 128,
    "model__image_size": 16,
    "data__augment": True,
    **KEPT,
  },
  # With this weight of the z-loss, no token of 20 steps has two experts whose scores differ by less than 9e-6. With
  # 0.01, the scores of one token differ by 5e-7, so rounding errors choose its expert.
  MIXTURE: {"model__experts": 8, "model__router": "sigmoid_bias", "model__shared_experts": 1, "model__router_z": 0.03},
  NUMBERS: {
    "model__inputs": "features",
    "model__objective": "regression",
    "model__features": 10,
    "model__outputs": 3,
    "model__dropout": 0.1,
  },
  # A gate times a state: with a learning rate of 3e-3, rounding errors of 20 steps grow to 5e-5 of the gradient's norm.
  RECURRENT: {
    "model__mixer": "recurrence",
    "data__packing": "documents",
    "model__dropout": 0.1,
    "model__remat": "full",
    "model__saved": "attended,value",
    "optimizer__learning_rate": 5e-4,
  },
  MUON: {
    "model__tied_embedding": True,
    "model__remat": "full",
    "model__saved": "key,attended,mlp_up",
    "model__mlp_width": 128,
    "model__seq_len": 112,
    "model__depth": 8,  # which devices that hold the same pieces divide
    "optimizer__name": "muon",
    "optimizer__moments": "bfloat16",
  },
  ADAFACTOR: {**IMAGES, "optimizer__name": "adafactor"},
}
OTHERS = [name for name in strategies.names() if name != "single"]
# Adam's first moment has the gradients. "text" has no option that another variant lacks.
SHARED = each_once(
  OTHERS, [name for name, fields in VARIANTS.items() if name != "text" and "optimizer__name" not in fields],
  ("zero2", ACCUMULATION), ("two_d", ACCUMULATION), ("pipeline", ACCUMULATION), ("three_d", DOCUMENTS),
  ("hsdp", DOCUMENTS), ("fsdp", DOCUMENTS), ("zero1", "images"), ("data_parallel", ACCUMULATION),
  ("tensor_parallel", ADAPTED), ("pmap_ddp", ADAPTED), ("context", NUMBERS), ("expert", MIXTURE),
  ("expert_fsdp", MIXTURE), ("long_context", RECURRENT),
)  # fmt: skip


def make_program(variant: str, **fields: object) -> Program:
  return settings.program(config(steps=STEPS, **(SMALL | VARIANTS[variant] | fields)), "cpu")


def fitting(name: str, variant: str) -> Program:
  """The variant, without what a strategy does not do. A single device keeps everything on the device, to compare."""
  plain = {"optimizer__on_host": False, "model__remat": "minimal", "model__saved": ""}
  cannot = {"single": plain, "pmap_ddp": {"optimizer__on_host": False}}
  in_stages = {"model__remat": "full"} if strategies.layout_of(name).layers else {}
  return make_program(variant, **(cannot.get(name, in_stages) if VARIANTS[variant].keys() >= KEPT.keys() else {}))


@functools.cache
def runner_of(name: str, variant: str) -> Strategy:
  """The strategy with this variant. The tests of a process share it, so its step is traced once."""
  return strategy(name, fitting(name, variant), **MICROBATCHES)
