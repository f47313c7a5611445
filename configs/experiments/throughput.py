"""throughput and throughput_gpu: the models of the throughput tables, for a CPU and for accelerators.

    python -m tools.benchmark throughput

Takes about 45 minutes on 2 CPU cores; lab/benchmarks/README.md shows the results. The data is synthetic, so it is the
same on every machine. throughput has 3.5 million parameters and runs about one step a second on 2 cores.
throughput_gpu has 256 million: one H100 trained it at 246,000 tokens a second, 1.03 times as fast as PyTorch did
(docs/accelerator.md).
"""

from ml_collections import ConfigDict


def throughput(config: ConfigDict) -> None:
  config.data.name = "synthetic"
  config.model.update(width=256, depth=4, mlp_width=768)  # one block for each stage of the pipeline
  config.update(batch_size=64, sample_length=0)  # large, so that the optimizer takes a small part of a step


def throughput_gpu(config: ConfigDict) -> None:
  throughput(config)
  config.update(batch_size=32)
  config.pipeline.microbatches = 16
  config.model.update(width=1024, depth=16, heads=16, kv_heads=8, mlp_width=2816, seq_len=1024, vocab_size=32_768)
