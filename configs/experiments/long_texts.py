"""long_texts: a model of short texts learns to read longer ones.

    python train.py --config=configs/fsdp.py --config.data.packing=documents --workdir=runs/short
    python train.py --config=configs/long_context.py:long_texts --config.init_from=runs/short --config.mesh.context=4 \
      --config.batch_size=2 --config.eval_batch_size=8 --workdir=runs/long

RESULT
"""

from ml_collections import ConfigDict

SHORT, LONG = 128, 4096  # positions before and after


def long_texts(config: ConfigDict) -> None:
  config.model.update(seq_len=LONG, rope_scaling=(LONG / SHORT, 1.0, 4.0, SHORT), remat="full")
  config.data.packing = "documents"
  config.optimizer.update(learning_rate=1e-3, warmup=10)
  config.update(steps=60, log_every=10, eval_every=20, eval_examples=32, eval_by_position=True, sample_length=0)
