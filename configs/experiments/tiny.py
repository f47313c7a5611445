"""tiny: a language model that trains in seconds, for tests and for trying things out.

    python train.py --config=configs/fsdp.py:tiny

40 steps on 8 devices simulated from 2 CPU cores take a few seconds, mostly to compile. Validation loss 2.5856
(Python 3.11, jax 0.10.2). The model has two query heads for each key-value head.
"""

from ml_collections import ConfigDict


def tiny(config: ConfigDict) -> None:
  config.model.update(width=64, depth=4, heads=16, kv_heads=8, mlp_width=128, seq_len=32)
  config.optimizer.update(warmup=5)
  config.update(steps=40, log_every=10, eval_every=20, eval_batch_size=32, eval_examples=80, sample_length=24)
