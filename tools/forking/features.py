"""What a slim fork can keep or leave out: the files of each feature, and what runs without it use.

What is in no feature is the core, as far as the core itself needs it. A strategy is a feature under its name, with its
config. Tests, docs and dependencies follow from the files (slimming.py).

`used` names the functions of a feature that every run calls, mostly to find that the feature is off. They stay in the
file that stands in for the feature's (standins.py).
"""

import dataclasses
import fnmatch
from collections.abc import Iterable

from errors import ConfigError, did_you_mean
from tools.forking.tree import Files


@dataclasses.dataclass(frozen=True)
class Feature:
  """What belongs to a feature. All are words with spaces between them.

  Attributes:
    files: patterns of its files.
    needs: other features that it cannot do without.
    used: functions and methods that stay.
    words: a regular expression for what its tests say, if they say it without importing it.
  """

  about: str
  files: str
  needs: str = ""
  used: str = ""
  words: str = ""


STRATEGY = {  # what a strategy needs beside its file
  "pipeline": "stages", "three_d": "stages", "pmap_ddp": "pmap", "context": "positions", "long_context": "positions",
  "expert": "experts", "expert_fsdp": "experts",
}  # fmt: skip
FEATURES = {
  "text": Feature(
    "texts, as bytes",
    files="data/text/*",
    words=r"\.txt",
  ),
  "tokenizers": Feature(
    "BPE and other tokenizers",
    files="data/text/tokenizers.py data/text/tokenizer_files.py data/text/ranks.py",
    needs="text",
    used="Tokenizer Tokenizer.dtype bytes_ _bytes dtype_of find_file room units of_bytes _generation",
    words="bpe|tokenizer",
  ),
  "rows": Feature(
    "JSON lines, Parquet, CSV and other tables of texts; dialogues, labels, packed documents",
    files=(
      "data/text/rows/* data/text/chat.py data/text/templates.py data/text/classes.py data/text/labels.py "
      "data/text/sandbox.py data/text/named_tokens.py data/text/packing.py data/text/missing.py data/records.py "
      "data/text/spans.py"
    ),
    needs="text tfds",
    used="Fields Fields.__post_init__ Fields.key Fields.in_spans of_bytes",
    words="prompt|packing|jsonl|documents|completion|messages|csv|parquet|segments|label_field|saved_dict|data_set",
  ),
  "tokens": Feature(
    "files of token ids",
    files="data/text/foreign.py data/text/headers.py data/text/megatron.py data/text/scan.py data/text/token_rows.py",
    needs="text",
    used="find named _with",
    words=r"\.npy|\.bin\b",
  ),
  "tfds": Feature(
    "TensorFlow Datasets",
    files="data/tfds.py",
    words="tfds",
  ),
  "images": Feature(
    "images and CIFAR-10",
    files="data/images/* configs/experiments/cifar10.py configs/experiments/images.py",
    needs="tfds",
    words="image|cifar|pixel",
  ),
  "synthetic": Feature(
    "data made up",
    files="data/synthetic.py",
    words="synthetic",
  ),
  "experts": Feature(
    "mixtures of experts",
    files=(
      "models/experts.py models/expert_sizes.py models/ops/experts.py models/ops/exchange.py "
      "models/ops/expert_rows.py models/ops/grouped.py models/ops/ragged.py models/ops/transports.py "
      "models/ops/routing.py reporting/dead_experts.py configs/experiments/mixture.py"
    ),
    used="ExpertSizes.of of_layers penalty no_sums metrics DeadExperts DeadExperts.__init__",
    words="expert|router",
  ),
  "adapters": Feature(
    "LoRA",
    files="models/lora.py configs/experiments/fine_tuning.py",
    used=(
      "LoraSizes.of targets_of check_targets Adapters Adapters.__init__ Adapters.into_stream Adapters.after_stream "
      "adapter_weights Adapters.__call__"
    ),
    words="lora|adapter",
  ),
  "positions": Feature(
    "texts split over devices",
    files="models/ops/context.py models/ops/halo.py models/ops/peers.py configs/experiments/long_texts.py",
    words="attention_context",
  ),
  "stages": Feature(
    "pipelines",
    files="strategies/execution/stages/*",
    words="pipeline|microbatch",
  ),
  "pmap": Feature(
    "jax.pmap",
    files="strategies/execution/pmapped.py",
    words="pmap",
  ),
  "optimizers": Feature(
    "Muon and Adafactor, and an optimizer's state in the host's memory",
    files="training/optimizers/adafactor.py training/optimizers/muon.py training/streaming.py",
    words="OPTIMIZERS|muon|adafactor|on_host",
  ),
  "projects": Feature(
    "models of any flax module, and projects",
    files="training/module.py training/counting.py projects/*",
    words="projects",
  ),
  "pretrained": Feature(
    "models in the form of Hugging Face",
    files="checkpointing/pretrained/*",
    needs="tokenizers",
    used="adopt is_folder Folder Folder.is_folder",
    words="pretrained|safetensors|model_folder",
  ),
  "memory": Feature(
    "checkpoints in the hosts' memory",
    files="checkpointing/memory/*",
    used="Tier Tier.__init__ Tier.__enter__ Tier.__exit__ Tier.summary",
    words="memory_every|memory_dir",
  ),
  "buckets": Feature(
    "workdirs in buckets",
    files=(
      "runtime/storage/lease.py runtime/storage/mirror.py runtime/storage/bucket.py "
      "checkpointing/shipping.py data/remote.py"
    ),
    used="here is_url location brought",
    words="gs://|s3://|bucket|mirror",
  ),
  "healing": Feature(
    "comparing and healing the copies of weights",
    files="runtime/replicas.py",
    used="Replicas Replicas.__init__ Replicas.check Replicas.due",
    words="check_every|replicas",
  ),
  "profile": Feature(
    "traces of steps",
    files="runtime/profiling.py",
    used=(
      "Profiler Profiler.__init__ Profiler.__enter__ Profiler.__exit__ Profiler.step Profiler.after Profiler._finish"
    ),
    words="profile",
  ),
  "trackers": Feature(
    "runs reported to Weights & Biases and MLflow",
    files="reporting/trackers.py",
    used="check trackers",
    words="trackers|wandb|mlflow",
  ),
  "init_from": Feature(
    "runs that start with the weights of another",
    files="checkpointing/initial.py",
    words="init_from",
  ),
  "interval": Feature(
    "checkpoint.minutes='auto'",
    files="checkpointing/interval.py",
    words="interval",
  ),
  "lab": Feature(
    "the laboratory, and the commands that predict, measure and teach",
    files="lab/* tools/[a-z]*",
    needs=(
      "commands launch projects pretrained rows tokens tokenizers stages experts positions adapters optimizers buckets "
      "memory healing profile images synthetic pmap init_from interval"
    ),
    words="explain|lab/",
  ),
  "commands": Feature(
    "commands that use a run: prepare, report, checkpoint, generate, evaluate, export; doctor",
    files=(
      "tools/prepare.py tools/report.py tools/checkpoint.py tools/generate.py tools/evaluate.py tools/export.py "
      "tools/doctor.py tools/sbom.py runtime/checkup.py"
    ),
    needs="rows tokens tokenizers pretrained init_from",
    words="python -m tools",
  ),
  "launch": Feature(
    "jobs of several processes that are started again",
    files="tools/launch.py job/attempt.py job/supervisor.py job/slurm.py docs/launch/*",
    words="launch|attempt",
  ),
}


def strategies_of(files: Files) -> list[str]:
  """The names of the strategies among the files."""
  found = (path.split("/") for path in files if path.startswith("strategies/"))
  return [
    parts[1].removesuffix(".py") for parts in found if len(parts) == 2 and parts[1] not in ("__init__.py", "layout.py")
  ]


def chosen(names: Iterable[str], files: Files) -> set[str]:
  """The features of `--keep`, with those that they need. Raises ConfigError for an unknown name."""
  known, kept = [*FEATURES, *strategies_of(files)], set[str]()
  waiting = [name for name in names if name]
  while waiting:
    name = waiting.pop()
    if name not in known:
      raise ConfigError(f"--keep has {name!r}{did_you_mean(name, known)}; the names are {', '.join(known)}")
    if name not in kept:
      kept.add(name)
      waiting += (FEATURES[name].needs if name in FEATURES else STRATEGY.get(name, "")).split()
  return kept


def left_out(kept: set[str], files: Files) -> dict[str, str]:
  """The files of features that are not kept, with the name of the feature."""
  found = dict[str, str]()
  patterns = [(pattern, name) for name, feature in FEATURES.items() for pattern in feature.files.split()]
  for path in files:
    names = [name for pattern, name in patterns if fnmatch.fnmatch(path, pattern)]
    if names and not kept.issuperset(names[-1:]):
      found[path] = names[-1]
  return found
