"""long_texts: a model of short texts learns to read longer ones.

    python train.py --config=configs/fsdp.py --config.data.packing=documents --workdir=runs/short
    python train.py --config=configs/long_context.py:long_texts --config.init_from=runs/short --config.mesh.context=4

TIME AND RESULT
"""

from ml_collections import ConfigDict


def long_texts(config: ConfigDict) -> None:
  config.model.update(seq_len=4096, rope_scaling=(32.0, 1.0, 4.0, 128), remat="full")  # 32 times the 128 of before
  config.data.packing = "documents"
  config.optimizer.update(learning_rate=1e-3, warmup=10)
  config.update(steps=60, batch_size=2, log_every=10, sample_length=0)
  config.update(eval_every=20, eval_batch_size=8, eval_examples=32, eval_by_position=True)
