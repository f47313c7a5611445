"""long_texts: a model of short texts learns to read longer ones.

    python train.py --config=configs/fsdp.py --config.data.packing=documents --workdir=runs/short
    python train.py --config=configs/long_context.py:long_texts --config.init_from=runs/short --config.mesh.context=4 \
      --config.batch_size=2 --config.eval_batch_size=2 --workdir=runs/long

The second run takes 6 minutes of CPU time and 6 GB on 8 devices simulated from 2 CPU cores; with other work on them it
took 12 minutes. Its loss at positions 2,049 to 4,096 is 2.641 before the first step and 1.686 after the last, below the
1.824 at positions 65 to 128 (Python 3.11, jax 0.10.2).
"""

from ml_collections import ConfigDict

SHORT, LONG = 128, 4096  # positions before and after


def long_texts(config: ConfigDict) -> None:
  config.model.update(seq_len=LONG, rope_scaling=(LONG / SHORT, 1.0, 4.0, SHORT), remat="full")
  config.data.packing = "documents"
  config.optimizer.update(learning_rate=1e-3, warmup=10)
  config.update(steps=60, log_every=10, eval_every=20, eval_examples=32, eval_by_position=True, sample_length=0)
