"""Every field with its default and meaning. A strategy's config is this one with its name in `strategy`.

Change any field on the command line: `--config.optimizer.learning_rate=3e-4`. Select a preset (configs/experiments/)
after a colon: `--config=configs/fsdp.py:cifar10`.
"""

import functools
from collections.abc import Callable

from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import placeholder

from configs.experiments import PRESETS
from errors import one_of


def config_of(strategy: str) -> Callable[..., ConfigDict]:
  """The function `get_config(preset="lm")` for a strategy's config file."""
  return functools.partial(get_config, strategy=strategy)


def get_config(preset: str = "lm", strategy: str = "single") -> ConfigDict:
  """The config of a strategy: the defaults below with the changes of the preset."""
  config = ConfigDict(
    {
      # What to run
      "strategy": strategy,  # a module of strategies/: how weights and batch are sharded over the devices
      "seed": 0,  # of all that is random: initial weights, order of examples, dropout, augmentation, rounding
      "steps": 300,  # updates to make; the learning rate decays over all of them
      "stop_after": 0,  # end this run cleanly after this step; 0: run all steps
      # End the run when so many evaluations in a row had no lower validation loss than the lowest before them.
      "stop": {"patience": 0},  # 0: run all steps
      "batch_size": 16,  # examples in a global batch, over all devices
      "accumulation": 1,  # parts that a batch runs in, one after another, to save memory
      # For weights in pieces: gather them, and scatter their gradients, for each "part" of the batch (least memory) or
      # once a "step" (least communication). Pipelines always do so once a step.
      "gather": "part",
      # Where to run. A mesh size that is not set is the strategy's default; -1 takes the devices that are left.
      "mesh": {axis: placeholder(int) for axis in ("replica", "stage", "data", "context", "expert", "model")},
      "sequence_parallel": True,  # where a strategy can, split the positions between products; False: keep them whole
      "simulated_devices": 8,  # CPU devices for each process if there is no accelerator; 1: a single device
      "distributed": {  # for a job of several processes; a cluster sets these itself (docs/cluster.md)
        "coordinator": "",  # HOST:PORT of process 0; "": use SLURM, Open MPI, Kubernetes, Cloud TPU or one process
        "processes": 0,  # with coordinator: the number of processes
        "process": -1,  # with coordinator: the number of this process, from 0
        "host": "",  # the host of this process, if several are simulated on one machine; "": the machine
        "timeout": 300,  # seconds to wait for all processes at the start
      },
      # Keeps compiled programs. "auto": JAX_COMPILATION_CACHE_DIR, else ~/.cache/meshwright/compiled; "": off
      "compilation_cache_dir": "auto",
      # A user, by name or number, whose folders are read here and in data.cache_dir, and never written (SECURITY.md)
      "cache_owner": "",  # "": what other users own is not read
      "compiler_options": "recommended",  # "recommended" (strategies/execution/options.py) or "default"
      "pipeline": {  # for strategies with a stage axis
        "schedule": "1f1b",  # "gpipe", "1f1b", "interleaved" or "zero_bubble"
        "microbatches": 8,  # parts of a batch; with 4 per stage, stages are idle in less than a fifth of the time
        "chunks": 0,  # for "interleaved": groups of layers in a stage; 0: two if the depth allows
      },
      # A folder of projects/ whose code registers models, data and more of your own (docs/fork.md)
      "project": "",  # "": none
      "own": {},  # the fields of a project, which its config adds
      # What to train
      "model": {
        "name": "transformer",  # or a model that a project registers, for which many fields below mean nothing
        "inputs": "tokens",  # what goes in: "tokens", "images" or "features" (sequences of vectors)
        "objective": "next_token",  # what is predicted: "next_token", "class" or "regression" (numbers)
        "width": 128,  # of the residual stream
        "depth": 4,  # blocks
        "mixer": "attention",  # how a block's positions read each other: "attention" or "recurrence"
        "mlp": "swiglu",  # what a block or an expert does with each position: also "geglu" or "swiglu_clamped"
        "heads": 8,  # query heads
        "kv_heads": 8,  # key-value heads, each shared by heads / kv_heads query heads
        "head_dim": 0,  # size of a head; 0: width / heads
        "mlp_width": 384,  # hidden units of the gated MLP
        # A mixture of experts in place of the MLP (docs/experts.md)
        "experts": 0,  # of each block; 0: none
        "dense_layers": 0,  # of a mixture: so many blocks at the start have the MLP of mlp_width, and no experts
        "experts_every": 1,  # of a mixture: 2: only every second block has experts, and the others an MLP of mlp_width
        "experts_per_token": 2,  # how many work on a token
        "expert_width": 0,  # hidden units of an expert; 0: mlp_width
        "shared_experts": 0,  # experts that work on every token, in addition to the chosen ones
        "router": "softmax_topk",  # how experts are chosen and weighed: also "topk_softmax", "sigmoid_bias"
        "router_scale": 1.0,  # the weights of a token's experts are multiplied by this
        "router_aux": 0.01,  # weight of the balance loss, which is 1 in a block whose experts have equal loads
        "router_z": 0.0,  # weight of the z-loss: the squared log-sum-exp of the scores
        "router_bias_rate": 0.001,  # "sigmoid_bias": how much a bias changes in a step
        # How tokens get to experts on other devices: "gather", "exchange", "ragged" or "auto"
        "expert_transport": "auto",
        # How many tokens of a sequence an expert takes at most, relative to an equal load; 0: all, so none is dropped
        "expert_capacity": 0.0,
        "seq_len": 128,  # tokens of a training example
        "window": 0,  # how many positions a local layer sees, itself included; 0: no layer is local
        # The kinds of layers, repeated, such as "local:5,global:1": "local", "global" or "nope" (global, without rotary
        # positions). "": with a window all are local, else all global
        "layers_pattern": "",
        "vocab_size": 256,  # 256 for bytes; a BPE is trained to this size; 0: that of the data's tokenizer
        "tied_embedding": False,  # the head is the embedding, transposed
        "dropout": 0.0,  # on the output of attention and MLP
        "rope_base": 10_000.0,  # of rotary embedding; use more for longer texts
        "rope_base_local": 0.0,  # that of local layers, which rope_scaling leaves as they are; 0: the same for all
        # To read longer texts than before. Llama 3's: (factor, low, high, length of before), such as (8., 1., 4., 8192)
        "rope_scaling": (),
        # Also "linear": (factor,); "yarn" and "yarn_unrounded": (factor, slow, fast, length, scale)
        "rope_scaling_kind": "llama3",
        "embedding_scale": 1.0,  # of tokens: Gemma's is the root of the width
        "attention_scale": 0.0,  # what scores of queries and keys are multiplied by; 0: 1 / the root of head_dim
        "norms": "before",  # of mixers and MLPs; "after": of what these return, as OLMo 2; "both", as Gemma 3
        "norm_eps": 1e-5,
        "norm_offset": 0.0,  # what is added to the scales of norms: Gemma's are stored without the 1
        "qkv_bias": False,  # add biases to queries, keys and values, as Qwen2 does
        "out_bias": False,  # and to what attention returns, as gpt-oss does
        "mlp_bias": False,  # and to each product of an MLP, or of experts and their router
        "attention_sinks": False,  # each head sees one more key: its score is learned, and its value is zero
        "qk_norm": False,  # normalize queries and keys, as Qwen3 does
        "qk_norm_over": "head",  # over each head; "width": over all heads together, as OLMo 2
        # Train small adapters of some weights and no other weight (docs/fine-tuning.md).
        "lora_rank": 0,  # of the adapters; 0: train all weights
        "lora_alpha": 16.0,  # what adapters add is multiplied by lora_alpha / lora_rank
        "lora_targets": "query,key,value,out,gate,up,down",  # the weights that have one; the last three in each expert
        "attention": "auto",  # "plain", "blockwise" (CPU), "cudnn" (NVIDIA), "splash" (TPU); "auto": the best
        # How attention reads positions of other devices, if they share them: "gather", "exchange", "ring" or "auto"
        "attention_context": "auto",
        # What the backward pass computes again. "minimal": only what is cheap; "dots": all but products with weights
        # and attention kernels; "full": everything; "offload": as "full", but what is saved is in the host's memory.
        "remat": "minimal",
        "saved": "",  # more values to save, by name and with commas, such as "attended,mlp_up" (docs/memory.md)
        "unroll": "auto",  # "scan": blocks in a loop; "all": without; "auto": what is faster (docs/memory.md)
        "loss_chunk": 0,  # tokens whose logits a device has at a time, at most; 0: automatic
        "products": "dtype",  # of blocks' weights: "float8", or "float8_gathers": only sent so (docs/float8.md)
        "dtype": "auto",  # of the computation: "auto" (float32 on CPU, bfloat16 elsewhere), "float32" or "bfloat16"
        "param_dtype": "float32",  # of the stored weights; in "bfloat16" updates are rounded at random
        "image_size": 0,  # pixels along a side; 0: that of the data's images
        "channels": 0,  # 1 for grey, 3 for color; 0: those of the data's images
        "patch_size": 4,  # an image becomes (image_size / patch_size)² positions
        "pixel_mean": (),  # of each channel, where white is 1, to normalize images; (): of the training images
        "pixel_std": (),  # their standard deviation; (): of the training images
        "features": 0,  # numbers at each position, for inputs="features"; 0: those of the data
        "classes": 0,  # labels to tell apart; 0: those of the data
        "outputs": 0,  # numbers to predict, for objective="regression"; 0: those of the data
      },
      "optimizer": {  # the scales of norms and biases are not decayed
        "name": "adamw",  # "adamw", "muon" (AdamW outside the blocks), "adafactor", "lion" or "sgd"
        "learning_rate": 3e-3,  # the peak, reached after warm-up
        "schedule": "cosine",  # after warm-up: "cosine", "constant" or "wsd" (stays, then decays)
        "warmup": 50,  # steps of linear warm-up
        "final_fraction": 0.1,  # cosine and wsd decay to this fraction of the peak
        "decay_fraction": 0.2,  # wsd: the share of all steps in which the learning rate decays, the last ones
        "b1": 0.9,  # adamw, muon: decay of the first moment; lion: its share in an update
        "b2": 0.95,  # adamw, muon, adafactor: decay of the second moment; lion: of the first
        "eps": 1e-8,  # adamw, muon: added to the root of the second moment
        "momentum": 0.95,  # muon, sgd: its decay
        "moments": "float32",  # what is stored of all these between steps: "float32" or "bfloat16"
        "weight_decay": 0.1,
        "clip_norm": 1.0,  # of the global gradient norm; 0: no clipping
        # Average the weights over steps, with this decay, such as 0.999: evaluation, samples and export use the mean.
        "ema": 0.0,  # 0: no average
        "on_host": False,  # keep the state in the host's memory, and bring it to the device for the update
      },
      "data": {
        "name": "text",  # "text", "images" or "synthetic" (docs/data.md lists the forms of files)
        # A file or folder; for text also several with commas, for images also tfds:NAME. {"FOLDER": 0.7, "FILE": 0.3}
        # mixes sources, each with its share of the examples. "": for text, Python's standard library.
        "path": FieldReference("", field_type=object),
        "validation_path": "",  # files to validate on; "": one in 20 examples of `path`, or its own validation split
        # What the files are read as: "text", "rows" or "tokens"; "auto": what they hold (docs/data.md). Not for images
        "form": "auto",
        "text_field": "text",  # the field, or column, that holds the text
        "label_field": "label",  # and the one that holds its class, for model.objective="class"
        # The field that holds the prompt, to train on prompts and completions; the loss counts completions alone.
        "prompt_field": "",  # "": no prompts; with them, packing must be "documents"
        "completion_field": "completion",  # with prompts: the field that holds the completion, in place of text_field
        # The field that holds the messages of a dialogue, to train on the assistant's turns. Beside prompt_field, a row
        # may be either.
        "messages_field": "",  # "": no dialogues; with them, packing must be "documents"
        "tokenizer": "bytes",  # "bytes", "bpe" (trained to model.vocab_size), or a tokenizer.json
        "packing": "windows",  # a sequence is "windows": of all text in a row; "documents": of whole documents
        "resize": 0,  # images: scale the shorter side to so many pixels and cut out the middle; 0: as they are
        "dir": "",  # the folder of TensorFlow Datasets; "": TFDS_DATA_DIR, else ~/tensorflow_datasets
        "augment": False,  # images: random crop and flip
        "read_ahead": 2,  # batches that are read before they are needed, and at least one a thread
        "threads": 1,  # threads that read them
        "on_bad_row": "stop",  # a row that cannot be read: "stop", to go on when it is corrected, or "skip" it, counted
        "on_change": "error",  # sources or weights of a resumed run: "error" if they changed, or "continue" with them
        "cache_dir": "~/.cache/meshwright/data",  # tokenized text and decoded images
        # What files of strangers may take (docs/data.md): MB of a row, value or array, and millions of pixels of images
        "limit_mb": 64,
        "limit_ratio": 1000,  # prepared data above 1 GB may be so many times as large as its files
      },
      # What to save, in WORKDIR/checkpoints. A run with the same workdir resumes from there.
      "checkpoint": {  # saved before each evaluation, at the end, on SIGTERM or SIGINT, and
        "every": 0,  # every so many steps; 0: not by steps
        # This many minutes after the last one; 0: not by time. "auto": as often as failures and the cost of saves ask
        "minutes": FieldReference(5.0, field_type=object),
        # Also keep the state in the memory of the hosts, every so many steps, with a copy on a neighbour of each.
        "memory_every": 0,  # 0: never (docs/checkpoints.md)
        "memory_dir": "",  # a folder in memory; "": /dev/shm/meshwright-UID
        "keep": 2,  # how many of the latest to keep
        "keep_best": 1,  # and how many of those with the lowest validation loss
      },
      # Start with the parameters of another run: its workdir, or one of its checkpoints. Or with a model in the form of
      # Hugging Face: a folder with config.json and safetensors, whose sizes and tokenizer replace those here.
      "init_from": "",
      # What to report
      "log_every": 20,  # steps between lines of metrics
      "eval_every": 0,  # steps between evaluations; 0: at the end only
      "eval_batch_size": 64,
      "eval_examples": 512,  # of the validation split, picked by a fixed shuffle; 0: all
      "eval_by_position": False,  # for text: also the loss by the position in its text, in powers of two
      "max_skipped": 20,  # the run stops after so many updates in a row with a loss or gradient that is not finite
      "sample_length": 100,  # tokens of text to generate at the end; 0: none
      "sample_prompt": "def ",
      "sample_temperature": 0.8,
      "reporting": {
        "share": False,  # leave the command, hosts and paths out of report.html, to pass it on
        "wandb": "",  # also report to this project of Weights & Biases (docs/cluster.md); "": do not
        "mlflow": "",  # also report to this experiment of MLflow; "": do not
      },
      "runtime": {
        "heartbeat": 5.0,  # seconds between two signs of life of a process, in WORKDIR/heartbeats; 0: none
        # Compare the bits of what several devices hold, every so many steps and before each save (docs/cluster.md).
        "check_every": 0,  # 1: also heal a device with other bits than most; 0: never
      },
      "profile": {  # a trace of some steps, in WORKDIR/profile (docs/profile.md)
        "start": 10,  # record from the step that follows this many steps
        "steps": 0,  # how many steps to record; 0: none
      },
    }
  )
  PRESETS[one_of("preset", preset, PRESETS)](config)
  config.lock()  # from here on an unknown field is an error
  config.mesh.unlock()  # but a layout may have mesh axes of its own
  return config
