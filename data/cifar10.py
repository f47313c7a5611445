"""CIFAR-10 through TensorFlow Datasets, without TensorFlow.

Records in array_record form are read from `data.dir` or TFDS_DATA_DIR and decoded once into arrays, which later runs
memory-map. If the data set is not prepared there, it is downloaded and prepared first. This uses a builder of our own,
which writes the same records as the standard one. The standard builder needs TensorFlow, only to encode PNG files.
"""

import dataclasses
import hashlib
import io
import os
import queue
import socket
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
from ml_collections import ConfigDict

from data.batches import HostBatch
from data.cache import prepared
from data.dataset import Dataset
from errors import ConfigError
from models.config import ModelConfig

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
VERSION = "3.0.2"
LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE, PIXELS = 32, 32 * 32 * 3
CONNECT_SECONDS = 10.0  # how long to wait for the server before calling it unreachable


@dataclasses.dataclass(frozen=True)
class Images:
  """Images uint8 [N, 32, 32, 3] and labels int32 [N]."""

  images: np.ndarray
  labels: np.ndarray

  def __len__(self) -> int:
    return len(self.images)

  def read(self, ids: np.ndarray) -> HostBatch:
    return {"image": self.images[ids], "label": self.labels[ids]}


def load(config: ConfigDict, model: ModelConfig) -> Dataset:
  """Loads CIFAR-10 as memory-mapped arrays. Downloads it first if needed."""
  if (model.image_size, model.classes) != (SIDE, len(LABELS)):
    raise ConfigError(
      f"model.image_size={model.image_size} and model.classes={model.classes} do not fit CIFAR-10; use 32 and 10"
    )
  root = _root(config)
  folder = root / "cifar10" / VERSION
  if not is_prepared(config):
    prepare(root)
  records = sorted((f.name, f.stat().st_size) for f in folder.glob("*.array_record*"))
  if not records:
    raise ConfigError(
      f"data.dir={str(root)!r} holds CIFAR-10, but not in array_record form; use another folder, to prepare it there"
    )
  decoded = prepared(config.cache_dir, "cifar10", (str(folder.resolve()), records), lambda to: _decode(folder, to))
  splits = {
    split: Images(np.load(decoded / f"{split}-images.npy", mmap_mode="r"), np.load(decoded / f"{split}-labels.npy"))
    for split in ("train", "test")
  }
  return Dataset(
    train=splits["train"],
    validation=splits["test"],
    description=f"CIFAR-10: {len(splits['train']):,} images to train on and {len(splits['test']):,} to test on",
    fingerprint=(decoded / "sha256").read_text(),
  )


def is_prepared(config: ConfigDict) -> bool:
  """Whether the data set is prepared, so that `load` need not download it."""
  return (_root(config) / "cifar10" / VERSION / "dataset_info.json").exists()


def _root(config: ConfigDict) -> Path:
  return Path(config.dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def prepare(root: Path) -> None:
  """Downloads CIFAR-10 and writes it under `root` as TensorFlow Datasets does, in array_record form."""
  host = urlparse(URL)
  try:
    _connect(host.hostname or "", host.port or (443 if host.scheme == "https" else 80))
  except OSError as error:
    raise ConfigError(
      f"data.name='cifar10' is neither prepared in {str(root)!r} nor can it be downloaded ({host.hostname}: {error}); "
      "set TFDS_DATA_DIR or data.dir to a folder with cifar10/3.0.2 in array_record form, or run once with a network"
    ) from error
  print(f"downloading and preparing CIFAR-10 in {root}", flush=True)
  try:
    _builder_class()(data_dir=str(root), file_format="array_record").download_and_prepare()
  except Exception as error:  # network, disk or archive errors, of many types
    reason = str(error).strip().partition("\n")[0]
    raise ConfigError(
      f"data.dir={str(root)!r}: CIFAR-10 could not be downloaded to this folder ({type(error).__name__}: {reason}); "
      "fix that, or set TFDS_DATA_DIR or data.dir to a folder that holds CIFAR-10"
    ) from error


def _connect(host: str, port: int) -> None:
  """Raises OSError unless the server answers within CONNECT_SECONDS, including the look-up of its name."""
  outcome: queue.Queue[OSError | None] = queue.Queue()

  def attempt() -> None:
    try:
      socket.create_connection((host, port), CONNECT_SECONDS).close()
      outcome.put(None)
    except OSError as error:
      outcome.put(error)

  threading.Thread(target=attempt, daemon=True).start()
  try:
    error = outcome.get(timeout=CONNECT_SECONDS)
  except queue.Empty:
    raise TimeoutError(f"no answer in {CONNECT_SECONDS:g} s") from None
  if error:
    raise error


def _builder_class() -> type:
  import tensorflow_datasets as tfds

  class Cifar10(tfds.core.GeneratorBasedBuilder):
    """The standard CIFAR-10, with images encoded by Pillow."""

    name = "cifar10"
    VERSION = tfds.core.Version(VERSION)

    def _info(self) -> Any:
      features = {
        "id": tfds.features.Text(),
        "image": tfds.features.Image(shape=(SIDE, SIDE, 3), encoding_format="png"),
        "label": tfds.features.ClassLabel(names=list(LABELS)),
      }
      return self.dataset_info_from_configs(
        features=tfds.features.FeaturesDict(features),
        supervised_keys=("image", "label"),
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
      )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
      archive = dl_manager.download(URL)
      return {"train": self._generate_examples(archive, "train"), "test": self._generate_examples(archive, "test")}

    def _generate_examples(self, archive: str, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
      for index, (label, image) in enumerate(read_archive(Path(archive), split)):
        yield index, {"id": f"{split}_{index:05d}", "image": io.BytesIO(_png(image)), "label": label}

  return Cifar10


def read_archive(archive: Path, split: str) -> Iterator[tuple[int, np.ndarray]]:
  """Yields the labels and images uint8 [32, 32, 3] of a split from the original archive (the "binary version")."""
  part = "data_batch" if split == "train" else "test_batch"
  with tarfile.open(archive) as files:
    members = (m for m in files.getmembers() if Path(m.name).name.startswith(part))
    for member in sorted(members, key=lambda m: m.name):
      content = files.extractfile(member)
      assert content  # it is a file, not a folder
      for row in np.frombuffer(content.read(), np.uint8).reshape(-1, 1 + PIXELS):
        yield int(row[0]), row[1:].reshape(3, SIDE, SIDE).transpose(1, 2, 0)  # [C, H, W] → [H, W, C]


def _png(image: np.ndarray) -> bytes:
  from PIL import Image

  with io.BytesIO() as out:
    Image.fromarray(image).save(out, "PNG")
    return out.getvalue()


def _decode(folder: Path, to: Path) -> None:
  """Decodes both splits in `folder` and writes them as arrays to `to`."""
  import tensorflow_datasets as tfds

  builder = tfds.builder_from_directory(str(folder))
  digest = hashlib.sha256()
  for split in ("train", "test"):
    source = builder.as_data_source(split)
    images = np.empty((len(source), SIDE, SIDE, 3), np.uint8)
    labels = np.empty(len(source), np.int32)
    for start in range(0, len(source), 1000):
      chunk = source.__getitems__(range(start, min(start + 1000, len(source))))
      images[start : start + len(chunk)] = [example["image"] for example in chunk]
      labels[start : start + len(chunk)] = [example["label"] for example in chunk]
    np.save(to / f"{split}-images.npy", images)
    np.save(to / f"{split}-labels.npy", labels)
    digest.update(images.data)
    digest.update(labels.data)
  (to / "sha256").write_text(digest.hexdigest())
