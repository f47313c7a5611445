"""Downloads CIFAR-10 and prepares it for TensorFlow Datasets, without TensorFlow.

This uses a builder of our own, which writes the same records as the standard one. The standard builder needs
TensorFlow, only to encode PNG files. tfds.py reads the records.
"""

import hashlib
import io
import queue
import socket
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np

from errors import ConfigError

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"  # as TensorFlow Datasets has it, too
NAME, VERSION = "cifar10", "3.0.2"
LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE, PIXELS = 32, 32 * 32 * 3
CONNECT_SECONDS = 10.0  # how long to wait for the server before calling it unreachable


def is_prepared(root: Path) -> bool:
  """Whether any version of CIFAR-10 is in a folder of TensorFlow Datasets, so that it need not be downloaded."""
  return any((root / NAME).glob("*/dataset_info.json"))


def prepare(root: Path) -> None:
  """Downloads CIFAR-10 and writes it under `root` as TensorFlow Datasets does, in array_record form."""
  host = urlparse(URL)
  try:
    _connect(host.hostname or "", host.port or (443 if host.scheme == "https" else 80))
  except OSError as error:
    raise ConfigError(
      f"data.path='tfds:cifar10' is neither prepared in {str(root)!r} nor can it be downloaded ({host.hostname}: "
      f"{error}); set TFDS_DATA_DIR or data.dir to a folder with cifar10/3.0.2 in array_record form, or run once "
      "with a network"
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

    name = NAME
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
      check_archive(Path(archive))
      return {"train": self._generate_examples(archive, "train"), "test": self._generate_examples(archive, "test")}

    def _generate_examples(self, archive: str, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
      for index, (label, image) in enumerate(read_archive(Path(archive), split)):
        yield index, {"id": f"{split}_{index:05d}", "image": io.BytesIO(_png(image)), "label": label}

  return Cifar10


def check_archive(archive: Path) -> None:
  """Raises ValueError, and removes the archive, unless it is the original. The library checks URLs that it knows."""
  with archive.open("rb") as file:
    found = hashlib.file_digest(file, "sha256").hexdigest()
  if found != SHA256:
    archive.unlink()
    raise ValueError(f"the archive has the SHA-256 {found}, and not that of the original, {SHA256}")


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
