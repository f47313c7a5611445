"""The presets. Each file begins with the command, the run time and the result.

A preset is a function that changes the defaults of configs/base.py. Apply it with `--config=configs/fsdp.py:PRESET`.
"""

from configs.experiments.cifar10 import cifar10, cifar10_gpu
from configs.experiments.fine_tuning import finetune, lora
from configs.experiments.images import images
from configs.experiments.language_model import lm, lm_1b
from configs.experiments.long_texts import long_texts
from configs.experiments.mixture import moe, moe_tiny
from configs.experiments.throughput import throughput, throughput_gpu
from configs.experiments.tiny import tiny

PRESETS = {
  preset.__name__: preset
  for preset in (
    lm, lm_1b, cifar10, cifar10_gpu, images, finetune, lora, long_texts, moe, moe_tiny, tiny, throughput,
    throughput_gpu,
  )
}  # fmt: skip
