"""Every field with its default and meaning, and the presets. Each strategy's config is this with its name in it.

Change any field from the command line: `--config.optimizer.learning_rate=3e-4`. A preset follows the file's name
after a colon: `--config=configs/fsdp.py:cifar10`.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from errors import one_of


def get_config(preset: str, strategy: str) -> ConfigDict:
  """The config of a strategy: the defaults below, changed by the preset."""
  config = ConfigDict(
    {
      # What to run
      "strategy": strategy,  # a module of strategies/: how weights and batch are split over the devices
      "seed": 0,  # of the initial weights, the order of examples, dropout and augmentation
      "steps": 300,  # length of the schedule, in updates
      "stop_after": 0,  # end this run cleanly after so many steps of the schedule; 0: run it all
      "batch_size": 16,  # examples in a global batch, over all devices
      "accumulation": 1,  # microbatches a step, one after another, to fit a batch into memory
      # Where to run. Mesh sizes left out are the strategy's own; -1 means the devices that are left.
      "mesh": {axis: placeholder(int) for axis in ("replica", "stage", "data", "context", "expert", "model")},
      "simulated_devices": 8,  # made by each process from its CPU where no accelerator is found; 1: plain single device
      "distributed": {  # a job of several processes, where no cluster tells (docs/cluster.md)
        "coordinator": "",  # HOST:PORT of process 0; "": as SLURM, Open MPI, Kubernetes or Cloud TPU say, else alone
        "processes": 0,  # with coordinator: their number
        "process": -1,  # and which one this is, from 0
        "timeout": 300,  # seconds to wait for all of them at the start
      },
      "compilation_cache_dir": "~/.cache/meshwright/compiled",  # of programs that took over half a second; "": off
      "pipeline": {  # of the strategies that have a stage axis
        "schedule": "1f1b",  # "gpipe", "1f1b" or "interleaved"
        "microbatches": 8,  # that a batch goes through the stages in; with 4 a stage a fifth of the ticks are idle
        "chunks": 2,  # interleaved: the pieces of a stage, which are spread over the depth of the model
      },
      # What to train
      "model": {
        "inputs": "tokens",  # "tokens" or "images"
        "width": 128,  # of the residual stream
        "depth": 4,  # blocks
        "heads": 8,  # query heads; width / heads is the size of a head
        "kv_heads": 8,  # key-value heads, each shared by heads / kv_heads query heads
        "mlp_width": 384,  # hidden units of the gated MLP
        "seq_len": 128,  # tokens of a training example
        "vocab_size": 256,  # 256 for bytes; the size that a BPE is trained to
        "tied_embedding": False,  # the head is the embedding, transposed
        "dropout": 0.0,  # on the output of attention and MLP
        "rope_base": 10_000.0,  # of rotary embedding: longer texts want more
        "norm_eps": 1e-5,
        "attention": "auto",  # "plain", "blockwise" (CPU), "cudnn" (NVIDIA), or the platform's best
        "remat": "none",  # what the backward pass computes again: "none" (of cost), "dots": all but products, or "full"
        "dtype": "auto",  # of the computation: float32 on CPU, bfloat16 elsewhere; or a name
        "param_dtype": "float32",  # of the master weights and the optimizer's moments
        "image_size": 32,
        "patch_size": 4,  # an image becomes (image_size / patch_size)² positions
        "classes": 10,
      },
      "optimizer": {  # AdamW; weight decay spares the norms
        "learning_rate": 3e-3,  # the peak, reached after warm-up
        "warmup": 50,  # steps of linear warm-up
        "final_fraction": 0.1,  # of the peak, where the cosine ends
        "b1": 0.9,
        "b2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "clip_norm": 1.0,  # of the global gradient; 0: no clipping
      },
      "data": {
        "name": "text",  # "text", "cifar10" or "synthetic"
        "path": "",  # text: a file, a folder, or several with commas; "": the Python standard library's source
        "tokenizer": "bytes",  # text: "bytes", or "bpe" trained to model.vocab_size
        "dir": "",  # cifar10: the folder that holds cifar10/3.0.2; "": TFDS_DATA_DIR, else ~/tensorflow_datasets
        "augment": False,  # images: random crop and flip
        "cache_dir": "~/.cache/meshwright/data",  # tokenized text and decoded images
      },
      # What to keep, in WORKDIR/checkpoints. A run goes on from its workdir by itself.
      "checkpoint": {  # one after each evaluation, at the end, when told to stop by SIGTERM or SIGINT, and
        "every": 0,  # after so many steps; 0: not by steps
        "minutes": 5.0,  # when so many minutes have passed without one; 0: not by time
        "keep": 2,  # of the latest
        "keep_best": 1,  # and of those with the lowest validation loss
      },
      "init_from": "",  # begin with the parameters of another run: its workdir, or one checkpoint of it
      # What to tell
      "log_every": 20,  # steps between lines
      "eval_every": 0,  # steps between evaluations; 0: at the end only
      "eval_batch_size": 64,
      "eval_examples": 512,  # of the validation split, picked by a fixed shuffle; 0: all
      "max_skipped": 20,  # updates in a row with a loss or gradient that is not finite, before the run gives up
      "sample_length": 100,  # tokens to write at the end, where the data is text; 0: none
      "sample_prompt": "def ",
      "sample_temperature": 0.8,
    }
  )
  PRESETS[one_of("preset", preset, PRESETS)](config)
  config.lock()  # from here on an unknown field is an error
  return config


def lm(config: ConfigDict) -> None:
  """A byte-level language model of Python code, for a laptop. The defaults."""
  config.eval_every = 100


def cifar10(config: ConfigDict) -> None:
  """A small vision Transformer on CIFAR-10, for a laptop."""
  config.data.update(name="cifar10", augment=True)
  config.model.update(inputs="images", mlp_width=256)
  config.optimizer.update(learning_rate=2e-3, warmup=100, weight_decay=0.05)
  config.update(steps=2800, batch_size=64, log_every=100, eval_every=700, eval_batch_size=192, eval_examples=0)


def cifar10_gpu(config: ConfigDict) -> None:
  """A larger vision Transformer on CIFAR-10, for one GPU. Sized for 93% and more; not yet measured."""
  cifar10(config)
  config.model.update(width=384, depth=12, heads=8, kv_heads=8, mlp_width=1024, patch_size=2, dropout=0.1)
  config.optimizer.update(learning_rate=1e-3, warmup=2000, weight_decay=0.1, final_fraction=0.01)
  config.update(steps=40_000, batch_size=512, log_every=100, eval_every=2000, eval_batch_size=1024)


def tiny(config: ConfigDict) -> None:
  """Seconds: to try things out, and for tests. The model has two query heads for each key-value head."""
  config.model.update(width=64, depth=4, heads=16, kv_heads=8, mlp_width=128, seq_len=32)
  config.optimizer.update(warmup=5)
  config.update(steps=40, log_every=10, eval_every=20, eval_batch_size=32, eval_examples=80, sample_length=24)


def throughput(config: ConfigDict) -> None:
  """What `python -m tools.throughput` trains on a CPU: 3.5 million parameters, a step a second on two cores."""
  config.data.name = "synthetic"
  config.model.update(width=256, depth=4, mlp_width=768)  # a block for each stage of a pipeline
  config.update(batch_size=64, sample_length=0)  # so that the optimizer's work, once a step, is not most of it


def throughput_gpu(config: ConfigDict) -> None:
  """The same on accelerators: 256 million parameters, and room on one device of 80 GB. Not yet measured."""
  throughput(config)
  config.update(batch_size=32)
  config.pipeline.microbatches = 16
  config.model.update(width=1024, depth=16, heads=16, kv_heads=8, mlp_width=2816, seq_len=1024, vocab_size=32_768)


PRESETS = {
  "lm": lm,
  "cifar10": cifar10,
  "cifar10_gpu": cifar10_gpu,
  "tiny": tiny,
  "throughput": throughput,
  "throughput_gpu": throughput_gpu,
}
