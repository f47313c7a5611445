"""lm: a byte-level language model of Python code, for a laptop; lm_1b: a model of 1B parameters, for GPUs and TPUs.

    python train.py --config=configs/fsdp.py
    python train.py --config=configs/fsdp.py:lm_1b --config.data.path=my/texts

lm holds the defaults of configs/base.py. 300 steps on 8 devices simulated from 2 CPU cores take about a minute.
Validation loss 1.6244 (2.343 bits/byte), 28.5% below a byte bigram model, under every strategy (Python 3.11, jax
0.10.2). The text is the standard library of the running Python, so another version of Python gives another loss.

lm_1b: 1.01 billion parameters, sequences of 2,048 tokens, and 32,768 tokens in a batch. One H100 trains it at 80,800
tokens a second and needs 42 GiB.
Without `data.path` it trains on the standard library too, which is enough to measure its speed and too little to learn
from. `make accelerator STEP=language_model` measures tokens a second and MFU; docs/accelerator.md shows the results.
"""

from ml_collections import ConfigDict


def lm(config: ConfigDict) -> None:
  config.eval_every = 100


def lm_1b(config: ConfigDict) -> None:
  config.model.update(width=2048, depth=16, heads=16, kv_heads=16, mlp_width=6144, seq_len=2048, vocab_size=32_768)
  config.data.tokenizer = "bpe"
  config.optimizer.update(learning_rate=4e-4, warmup=500)
  config.update(steps=20_000, batch_size=16, log_every=10, eval_every=1000, eval_batch_size=16)
