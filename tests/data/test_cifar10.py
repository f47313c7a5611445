"""CIFAR-10: the real records if present, preparation from a small archive, and augmentation."""

import hashlib
import http.server
import io
import os
import tarfile
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import config, one_sentence
from ml_collections import ConfigDict

import data
import data.images
from data.images import cifar10
from training import augmentation

ROOT = Path(os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")).expanduser()
IS_THERE = pytest.mark.skipif(
  not (ROOT / "cifar10" / cifar10.VERSION).exists(),
  reason=f"the real CIFAR-10 is not prepared in {ROOT}; set TFDS_DATA_DIR to the folder that holds it",
)


def real(test: Any) -> Any:
  """Marks a test that needs the real images, which few machines have. Decoding them takes 14 s."""
  return pytest.mark.full(IS_THERE(test))


def settings(**fields: Any) -> ConfigDict:
  return config(preset="cifar10", **fields)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
  """A tiny archive in the format of the real one: 5 × 4 training and 3 test images."""
  random, path = np.random.default_rng(0), tmp_path / "cifar-10-binary.tar.gz"
  with tarfile.open(path, "w:gz") as out:
    for name, count in [(f"data_batch_{i}.bin", 4) for i in range(1, 6)] + [("test_batch.bin", 3)]:
      rows = random.integers(0, 256, (count, 1 + cifar10.PIXELS), dtype=np.uint8)
      rows[:, 0] %= 10
      info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
      info.size = rows.size
      out.addfile(info, io.BytesIO(rows.tobytes()))
  return path


@real
def test_the_real_data_set_is_complete():
  dataset = data.images.load(settings())
  (part,) = dataset.parts
  assert (len(part.train), len(part.validation)) == (50_000, 10_000)
  assert np.bincount(part.train.read(np.arange(50_000))["label"]).tolist() == [5000] * 10
  assert np.bincount(part.validation.read(np.arange(10_000))["label"]).tolist() == [1000] * 10
  # As published for CIFAR-10, over its training images.
  assert dataset.model == {
    "image_size": 32, "channels": 3, "classes": 10,
    "pixel_mean": (0.4914, 0.4822, 0.4465), "pixel_std": (0.2470, 0.2435, 0.2616),
  }  # fmt: skip
  assert dataset.class_names == cifar10.LABELS


@real
@pytest.mark.parametrize("batch", [96, 1000])
def test_evaluation_counts_exactly_ten_thousand(batch: int):
  (part,) = data.images.load(settings()).parts
  masks = [read["mask"] for read in data.EvaluationBatches(part.validation, batch).all()]
  assert sum(int(mask.sum()) for mask in masks) == 10_000
  assert {len(mask) for mask in masks} == {batch}


def test_preparation_writes_what_the_archive_holds(tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch):
  """Downloads from a server on this machine, prepares the records without TensorFlow, and loads them."""

  class Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(self, *args):
      super().__init__(*args, directory=str(tmp_path))

    def log_message(self, *_):
      pass

  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  monkeypatch.setattr(cifar10, "URL", f"http://127.0.0.1:{server.server_port}/{archive.name}")
  monkeypatch.setattr(cifar10, "SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
  try:
    fields = {"data__dir": str(tmp_path / "tfds"), "data__cache_dir": str(tmp_path / "cache")}
    (part,) = data.images.load(settings(**fields)).parts
  finally:
    server.shutdown()
  for split, source in (("train", part.train), ("test", part.validation)):
    expected = {image.tobytes(): label for label, image in cifar10.read_archive(archive, split)}
    assert len(source) == len(expected)
    read = source.read(np.arange(len(source)))
    found = {image.tobytes(): label for image, label in zip(read["image"], read["label"], strict=True)}
    assert found == expected  # the records are shuffled


@pytest.mark.parametrize("hangs", [True, False])
def test_no_data_and_no_network_give_one_sentence(hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """Also if the name look-up hangs, which the timeout of a socket does not limit."""
  assert cifar10.CONNECT_SECONDS < 15

  def unreachable(*_) -> None:
    if hangs:
      threading.Event().wait()
    raise OSError("network is unreachable")

  monkeypatch.setattr(cifar10, "CONNECT_SECONDS", 0.2)
  monkeypatch.setattr(cifar10.socket, "create_connection", unreachable)
  with one_sentence(
    "data.path='tfds:cifar10'", "neither prepared", "TFDS_DATA_DIR", "no answer" if hangs else "unreachable"
  ):
    data.images.load(settings(data__dir=str(tmp_path / "none")))


def test_records_in_another_format_are_refused(tmp_path: Path):
  folder = tmp_path / "cifar10" / cifar10.VERSION
  folder.mkdir(parents=True)
  (folder / "dataset_info.json").write_text("{}")
  (folder / "cifar10-train.tfrecord-00000-of-00001").touch()
  with one_sentence("data.path='tfds:cifar10'", str(folder), "not in array_record form", "data.dir"):
    data.images.load(settings(data__dir=str(tmp_path)))


def test_another_archive_is_neither_read_nor_kept(tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch):
  """The sum is that of the original. The builder is not started twice: the library registers it for good."""
  content = archive.read_bytes()
  monkeypatch.setattr(cifar10, "SHA256", hashlib.sha256(content).hexdigest())
  cifar10.check_archive(archive)
  archive.write_bytes(content[:-1] + b"x")
  with pytest.raises(ValueError, match="the archive has the SHA-256"):
    cifar10.check_archive(archive)
  assert not archive.exists()
  monkeypatch.undo()
  from tensorflow_datasets.core.download.checksums import load_url_infos
  from tensorflow_datasets.core.utils import tfds_path

  known = load_url_infos(tfds_path("url_checksums/cifar10.txt"))
  assert known[cifar10.URL].checksum == cifar10.SHA256


def test_a_failed_download_gives_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)  # fails every request
  threading.Thread(target=server.serve_forever, daemon=True).start()
  monkeypatch.setattr(cifar10, "URL", f"http://127.0.0.1:{server.server_port}/cifar.tar.gz")
  try:
    with one_sentence("data.dir=", "could not be downloaded"):
      data.images.load(settings(data__dir=str(tmp_path / "tfds")))
  finally:
    server.shutdown()


def test_data_that_the_model_cannot_read_is_refused():
  with one_sentence("data.name='images'", "model.inputs='tokens'", "'images'"):
    data.load(config(data__name="images", data__path="tfds:cifar10"))
  with one_sentence("data.name='image'", "did you mean 'images'"):
    data.load(settings(data__name="image"))


@jax.jit
def crop_and_flip(images: jax.Array, seed: int, order: jax.Array) -> jax.Array:
  """Of images that had this order when a seed gave each one its key."""
  return augmentation.crop_and_flip(images, jax.random.split(jax.random.key(seed), len(images))[order])


def test_crops_and_flips_are_keyed_by_example():
  images, order = np.random.default_rng(0).integers(1, 256, (64, 32, 32, 3), np.uint8), np.arange(64)
  changed = np.asarray(crop_and_flip(images, 1, order))
  np.testing.assert_array_equal(crop_and_flip(images[::-1], 1, order[::-1]), changed[::-1])
  assert (changed != images).any(axis=(1, 2, 3)).mean() > 0.9


def test_every_crop_is_a_shifted_or_mirrored_original():
  image = np.arange(1, 32 * 32 * 3 + 1, dtype=np.int32).reshape(1, 32, 32, 3)
  padded = np.pad(image[0], ((4, 4), (4, 4), (0, 0)))
  shifts = {(r, c): padded[r : r + 32, c : c + 32] for r in range(9) for c in range(9)}
  flips = set()
  for seed in range(40):
    out = np.asarray(crop_and_flip(image, seed, np.arange(1)))[0]
    straight = any((out == crop).all() for crop in shifts.values())
    mirrored = any((out == crop[:, ::-1]).all() for crop in shifts.values())
    assert straight or mirrored
    flips.add(mirrored)
  assert flips == {True, False}
