"""Images of one's own: folders, arrays and data sets of TensorFlow Datasets, written here and read back."""

import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import config, measured, one_sentence
from PIL import Image

import data.images
import train
from data.batches import Mixture
from data.dataset import Dataset, Source
from data.images import folder, store
from data.images.decode import is_grey, pixels
from data.images.examples import held_out

ROOT = Path(__file__).parents[2]
RANDOM = np.random.default_rng(0)


def load(path: Any, cache: Path, **fields: Any) -> Dataset:
  fields = {f"data__{name}" if name in ("resize", "validation_path", "dir") else name: x for name, x in fields.items()}
  return data.images.load(config(preset="images", data__path=path, data__cache_dir=str(cache), **fields))


def noise(*shape: int) -> np.ndarray:
  return RANDOM.integers(0, 256, shape, np.uint8)


def save(file: Path, image: np.ndarray, **options: Any) -> Path:
  file.parent.mkdir(parents=True, exist_ok=True)
  Image.fromarray(image).save(file, **options)
  return file


def make_folder(root: Path, shape: tuple[int, ...] = (8, 8, 3), **counts: int) -> dict[bytes, str]:
  """Writes PNG files with random pixels. Returns the class of each image by its pixels."""
  written = {}
  for name, count in counts.items():
    for i in range(count):
      image = noise(*shape)
      save(root / name / f"{i:03}.png", image)
      written[image.tobytes()] = name
  return written


def content(source: Source, labels: tuple[str, ...] = ()) -> dict[bytes, Any]:
  """The label of each image by its pixels, and its name if it has one."""
  read = source.read(np.arange(len(source)))
  assert (read["image"].dtype, read["label"].dtype) == (np.uint8, np.int32)
  found = {x.tobytes(): labels[y] if labels else int(y) for x, y in zip(read["image"], read["label"], strict=True)}
  assert len(found) == len(source)
  return found


class TestForms:
  def test_a_folder_gives_every_image_with_the_class_of_its_subfolder(self, tmp_path: Path):
    written = make_folder(tmp_path / "set", cat=30, dog=30)
    for number, suffix in enumerate(("bmp", "gif", "webp", "tiff", "PNG")):  # all keep these pixels exactly
      image = np.full((8, 8, 3), number, np.uint8)
      save(tmp_path / "set/ant/deeper" / f"x.{suffix}", image, **({"lossless": True} if suffix == "webp" else {}))
      written[image.tobytes()] = "ant"
    save(tmp_path / "set/ant/.hidden.png", noise(8, 8, 3))
    save(tmp_path / "set/.hidden/x.png", noise(8, 8, 3))
    (tmp_path / "set/dog/notes.txt").touch()

    found = load(str(tmp_path / "set"), tmp_path / "cache")
    (part,) = found.parts
    assert found.class_names == ("ant", "cat", "dog")
    assert {name: found.model[name] for name in ("image_size", "channels", "classes")} == {
      "image_size": 8, "channels": 3, "classes": 3,
    }  # fmt: skip
    used, validation = content(part.train, found.class_names), content(part.validation, found.class_names)
    assert len(validation) == 3  # 1 in 20
    assert used | validation == written
    assert "62 to train on and 3 to validate on (8×8, color, 3 classes; " in found.description
    assert "; not images: 'dog/notes.txt')" in found.description

  @pytest.mark.parametrize("name", ["val", "validation", "valid", "test"])
  def test_a_folder_may_have_a_split_to_validate_on(self, name: str, tmp_path: Path):
    written = make_folder(tmp_path / "set/train", ant=3, bee=3, cat=3)
    validation = make_folder(tmp_path / "set" / name, bee=1, cat=2)  # other numbers than in training
    found = load(str(tmp_path / "set"), tmp_path / "cache")
    assert content(found.parts[0].train, found.class_names) == written
    assert content(found.parts[0].validation, found.class_names) == validation

  def test_validation_path_replaces_the_split_of_the_data(self, tmp_path: Path):
    written = make_folder(tmp_path / "set/train", ant=2, bee=2)
    make_folder(tmp_path / "set/test", ant=2, bee=2)
    validation = make_folder(tmp_path / "other", bee=2)
    make_folder(tmp_path / "split/train", ant=2, bee=2)
    (tmp_path / "other").rename(tmp_path / "split/val")
    for path, other in (("set", "split/val"), ("set/train", "split/val"), ("set", "split")):
      found = load(str(tmp_path / path), tmp_path / "cache", validation_path=str(tmp_path / other))
      assert content(found.parts[0].train, found.class_names) == written
      assert content(found.parts[0].validation, found.class_names) == validation

  @pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
  @pytest.mark.parametrize("shape", [(60, 6, 6), (60, 6, 6, 1), (60, 6, 6, 3)])
  def test_arrays_are_read_in_parts(
    self, shape: tuple[int, ...], write: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
  ):
    monkeypatch.setattr(store, "CHUNK_IMAGES", 7)
    images, labels = noise(*shape), np.arange(60) % 3
    write(tmp_path / "a.npz", image=images, label=labels.astype(np.uint8))
    found = load(str(tmp_path / "a.npz"), tmp_path / "cache")
    (part,) = found.parts
    assert found.class_names == ()
    assert (found.model["classes"], found.model["channels"]) == (3, 3 if shape[3:] == (3,) else 1)
    assert part.train.read(np.arange(2))["image"].shape == (2, 6, 6, found.model["channels"])
    expected = {image.tobytes(): label for image, label in zip(images, labels, strict=True)}
    assert content(part.train) | content(part.validation) == expected
    assert (len(part.train), len(part.validation)) == (57, 3)

  def test_arrays_validate_on_others(self, tmp_path: Path):
    images = noise(9, 4, 4)
    np.savez(tmp_path / "a.npz", image=images[:6], label=np.arange(6) % 2)
    np.savez(tmp_path / "b.npz", image=images[6:], label=np.array([1, 1, 0]))
    (part,) = load(str(tmp_path / "a.npz"), tmp_path / "cache", validation_path=str(tmp_path / "b.npz")).parts
    assert (part.train.read(np.arange(6))["image"][..., 0] == images[:6]).all()
    read = part.validation.read(np.array([2, 0]))
    assert (read["image"][..., 0] == images[[8, 6]]).all()
    assert read["label"].tolist() == [0, 1]

  def test_a_mixture_has_a_part_for_each_source(self, tmp_path: Path):
    written = [make_folder(tmp_path / name, ant=10 * n, bee=10 * n) for name, n in (("x", 1), ("y", 3))]
    found = load({str(tmp_path / "y"): 3, str(tmp_path / "x"): 1}, tmp_path / "cache")
    assert [part.name for part in found.parts] == [str(tmp_path / "x"), str(tmp_path / "y")]
    assert found.weights == (1, 3)
    assert len(found.description.splitlines()) == 2
    for part, expected in zip(found.parts, written, strict=True):
      assert content(part.train, found.class_names) | content(part.validation, found.class_names) == expected
    mixture = Mixture(tuple(part.train for part in found.parts), found.weights)
    pixel = (
      mixture.read(np.arange(19 + 57))["image"] / 255
    )  # the mean is over all training images, whatever the weights
    np.testing.assert_allclose(found.model["pixel_mean"], pixel.mean((0, 1, 2)), atol=6e-5)
    np.testing.assert_allclose(found.model["pixel_std"], pixel.std((0, 1, 2)), atol=6e-5)


class TestHoldOut:
  def test_one_in_twenty_of_every_class_is_for_validation(self):
    labels = np.repeat(np.arange(4), [1000, 200, 60, 20])
    held = held_out(labels, map(str, range(len(labels))))
    assert np.bincount(labels[held]).tolist() == [50, 10, 3, 1]
    places = np.flatnonzero(held[:1000])
    assert 350 < places.mean() < 650  # spread over the class, in no regular steps
    assert len(set(np.diff(places))) > 20

  @pytest.mark.parametrize("sizes", [[2, 1], [1, 1, 1, 2], [15] * 30, [1] * 100 + [2]])
  def test_small_classes_keep_an_image_to_train_on(self, sizes: list[int]):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    held = held_out(labels, map(str, range(len(labels))))
    assert set(labels[~held]) == set(labels)
    assert 1 <= held.sum() <= max(1, len(labels) // 20)

  def test_moved_data_has_the_same_split_and_fingerprint(self, tmp_path: Path):
    make_folder(tmp_path / "here/set", ant=20, bee=20)
    (before,) = load(str(tmp_path / "here/set"), tmp_path / "cache").parts
    (tmp_path / "here").rename(tmp_path / "there")
    (after,) = load(str(tmp_path / "there/set"), tmp_path / "cache").parts
    assert after.fingerprint == before.fingerprint
    assert content(after.validation) == content(before.validation)

  def test_another_pixel_another_label_or_another_name_changes_the_fingerprint(self, tmp_path: Path):
    images, labels = noise(4, 4, 4), np.array([0, 1, 0, 1])
    variants = {"same": (images, labels), "same again": (images, labels)}
    variants |= {"pixel": (images ^ (np.arange(64) == 40).reshape(4, 4, 4), labels), "label": (images, labels[::-1])}
    found = {}
    for name, (image, label) in variants.items():
      np.savez(tmp_path / f"{name}.npz", image=image, label=label)
      found[name] = load(str(tmp_path / f"{name}.npz"), tmp_path / "cache").parts[0].fingerprint
    assert found["same"] == found["same again"]
    assert len(set(found.values())) == 3


class TestPixels:
  def test_the_mean_and_deviation_are_those_of_the_training_images(self, tmp_path: Path):
    images = noise(40, 5, 5, 3) // [1, 2, 4]  # another mean for each channel
    images = images.astype(np.uint8)
    images[:, :, :, 2] = 51  # a constant
    np.savez(tmp_path / "a.npz", image=images, label=np.arange(40) % 2)
    found = load(str(tmp_path / "a.npz"), tmp_path / "cache")
    used = found.parts[0].train.read(np.arange(38))["image"] / 255
    expected = used.std((0, 1, 2)).round(4).tolist()
    assert found.model["pixel_mean"] == tuple(used.mean((0, 1, 2)).round(4).tolist())
    assert found.model["pixel_std"] == (expected[0], expected[1], 0.0039)  # never 0
    assert found.model["pixel_mean"][2] == 0.2

  def test_a_folder_is_grey_if_all_its_images_are(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folder, "HEADERS", 2)
    grey = noise(8, 8)
    save(tmp_path / "a/x/0.png", grey)
    save(tmp_path / "a/x/1.png", grey > 128)  # 1 bit
    save(tmp_path / "a/y/2.png", grey.astype(np.uint16) * 256 + 99)  # 16 bits
    save(tmp_path / "a/y/3.gif", np.full((8, 8), 7, np.uint8))
    found = load(str(tmp_path / "a"), tmp_path / "cache", validation_path=str(tmp_path / "a"))
    assert found.model["channels"] == 1
    images = found.parts[0].train.read(np.arange(4))["image"][..., 0]
    assert (images[0] == grey).all()
    assert (images[1] == np.where(grey > 128, 255, 0)).all()
    assert (images[2] == grey).all()
    assert (images[3] == 7).all()
    save(tmp_path / "a/y/4.png", noise(8, 8, 3))
    found = load(str(tmp_path / "a"), tmp_path / "cache", validation_path=str(tmp_path / "a"))
    assert found.model["channels"] == 3
    assert (found.parts[0].train.read(np.array([0]))["image"][0] == grey[..., None]).all()

  def test_the_first_frame_of_an_animation_is_read(self, tmp_path: Path):
    frames = [Image.fromarray(np.full((4, 4), grey, np.uint8)) for grey in (10, 200)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert (pixels(str(tmp_path / "a.gif"), "a", 1) == 10).all()

  def test_palettes_transparency_and_orientation(self, tmp_path: Path, recwarn: pytest.WarningsRecorder):
    colors = np.array([[255, 0, 0], [0, 255, 0], [9, 8, 7]], np.uint8)
    index = np.array([[0, 1], [2, 1]], np.uint8)
    image = Image.new("P", (2, 2))
    image.putdata(index.ravel().tolist())
    image.putpalette(colors.ravel().tolist())
    image.save(tmp_path / "p.png", transparency=bytes([0, 255, 128]))
    assert not is_grey(str(tmp_path / "p.png"), "p")
    assert (pixels(str(tmp_path / "p.png"), "p", 3) == colors[index]).all()
    image.putpalette([0, 0, 0, 5, 5, 5, 90, 90, 90])
    image.save(tmp_path / "grey.png")
    assert is_grey(str(tmp_path / "grey.png"), "p")
    assert pixels(str(tmp_path / "grey.png"), "p", 1)[..., 0].tolist() == [[0, 5], [90, 5]]

    save(tmp_path / "alpha.png", noise_alpha := noise(4, 4, 4))
    assert (pixels(str(tmp_path / "alpha.png"), "a", 3) == noise_alpha[..., :3]).all()

    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it turned by 90 degrees clockwise
    turned = noise(2, 4, 3)
    save(tmp_path / "turned.png", turned, exif=exif)
    assert (pixels(str(tmp_path / "turned.png"), "t", 3) == np.rot90(turned, -1)).all()
    assert not [w for w in recwarn if "Palette" in str(w.message)]

  def test_resize_scales_the_shorter_side_and_cuts_out_the_middle(self):
    wide = noise(20, 60, 3)
    scaled = np.asarray(Image.fromarray(wide).resize((30, 10)), np.int32)
    assert np.abs(pixels(wide, "wide", 3, 10) - scaled[:, 10:20]).max() <= 1
    tall = np.ascontiguousarray(wide.transpose(1, 0, 2))
    assert np.abs(pixels(tall, "tall", 3, 10) - scaled[:, 10:20].transpose(1, 0, 2)).max() <= 1
    # Fine stripes become their mean, as they must with antialiasing.
    stripes = np.tile(np.array([[0, 255]], np.uint8), (40, 20))
    assert np.ptp(pixels(stripes, "stripes", 1, 4)) < 8
    assert abs(pixels(stripes, "stripes", 1, 4).mean() - 127.5) < 2
    # Scaled up, too.
    assert pixels(np.full((3, 3), 9, np.uint8), "small", 1, 6).tolist() == np.full((6, 6, 1), 9).tolist()

  def test_resize_is_prepared_apart(self, tmp_path: Path):
    np.savez(tmp_path / "a.npz", image=noise(8, 6, 9), label=np.arange(8) % 2)
    with one_sentence("data.path=", "a.npz, image 0' is 9×6", "not square", "data.resize=6"):
      load(str(tmp_path / "a.npz"), tmp_path / "cache")
    for size in (6, 3):
      found = load(str(tmp_path / "a.npz"), tmp_path / "cache", resize=size)
      assert found.model["image_size"] == size
      assert found.parts[0].train.read(np.array([0]))["image"].shape == (1, size, size, 1)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A folder of TensorFlow Datasets. Its data sets hold images like MNIST's: grey, 28×28, in ten classes."""
  import tensorflow_datasets as tfds

  root = tmp_path_factory.mktemp("tfds")

  def write(name: str, version: str, sizes: dict[str, int], features: Any = None, **options: Any) -> None:
    def info(self: Any) -> Any:
      image = tfds.features.Image(shape=(28, 28, 1), encoding_format="png")
      default = {"image": image, "label": tfds.features.ClassLabel(num_classes=10)}
      return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features or default))

    def generators(self: Any, _: Any) -> Any:
      return {split: self._generate_examples(split, size) for split, size in sizes.items()}

    def examples(self: Any, split: str, size: int) -> Any:
      for i in range(size):
        content = io.BytesIO()
        Image.fromarray(np.full((28, 28), i + 100 * (split != "train"), np.uint8)).save(content, "PNG")
        content.seek(0)
        yield i, {name: content if name == "image" else i % 10 for name in self.info.features}

    methods = {"_info": info, "_split_generators": generators, "_generate_examples": examples}
    configs = [tfds.core.BuilderConfig(name=c) for c in options.pop("configs", [])]
    body = {"name": name, "VERSION": tfds.core.Version(version), "BUILDER_CONFIGS": configs} | methods
    with tfds.core.registered.skip_registration():
      builder = type(name, (tfds.core.GeneratorBasedBuilder,), body | {"__module__": __name__})
    for one in configs or [None]:
      builder(data_dir=str(root), file_format="array_record", config=one).download_and_prepare()

  write("like_mnist", "1.0.0", {"train": 20, "test": 10})
  write("like_mnist", "1.10.0", {"train": 40, "test": 20})
  write("like_mnist", "1.9.0", {"train": 20, "test": 10})
  write("only_train", "1.0.0", {"train": 60})
  write("letters", "1.0.0", {"train": 20, "validation": 20, "test": 10}, configs=["upper", "lower"])
  write("no_label", "1.0.0", {"train": 20}, {"image": tfds.features.Image(shape=(28, 28, 1))})
  return root


class TestTensorFlowDatasets:
  @pytest.mark.parametrize("file, before, after, parts", [
    ("dataset_info.json", "{DATASET}-", "../../{DATASET}-", ["info.json of", "the file '../../like_mnist-"]),
    ("dataset_info.json", "{DATASET}-", "/etc/{DATASET}-", ["info.json of", "the file '..", "etc/like_mnist-"]),
    ("dataset_info.json", '"like_mnist"', '"../like_mnist"', ["names the file '../like_mnist-"]),
    ("features.json", "tensorflow_datasets.core.features.class_label", "antigravity", ["the class 'antigravity"]),
    ("like_mnist-test.array_record-00000-of-00001", "", "", ["a link out of this folder"]),
  ])  # fmt: skip
  def test_a_data_set_of_a_stranger_leads_to_no_other_files_or_modules(
    self, file: str, before: str, after: str, parts: list[str], prepared: Path, tmp_path: Path
  ):
    folder = tmp_path / "tfds/like_mnist/1.0.0"
    shutil.copytree(prepared / "like_mnist/1.0.0", folder)
    if before:
      content = (folder / file).read_text()
      assert before in content
      (folder / file).write_text(content.replace(before, after))
    else:
      (folder / file).rename(tmp_path / file)
      (folder / file).symlink_to(tmp_path / file)
    with one_sentence("data.path='tfds:like_mnist'", *parts):
      load("tfds:like_mnist", tmp_path / "cache", dir=str(tmp_path / "tfds"))
    assert "antigravity" not in sys.modules

  @pytest.mark.parametrize("how", ["a class in a text", "a file of names", "a link to names"])
  def test_texts_in_its_features_are_looked_through(
    self, how: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
  ):
    """The library reads JSON within texts of features.json, and names of classes from any file."""
    folder, secret = tmp_path / "tfds/like_mnist/1.0.0", tmp_path / "secret"
    shutil.copytree(prepared / "like_mnist/1.0.0", folder)
    (tmp_path / "stranger_module.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    secret.write_text("".join(f"secret {i}\n" for i in range(10)))
    features = json.loads((folder / "features.json").read_text())
    core = "tensorflow_datasets.core.features"
    as_text = lambda name, value: {"pythonClassName": f"{core}.{name}", "jsonFeature": {"json": json.dumps(value)}}
    change, parts = {
      "a class in a text": (
        as_text("sequence_feature.Sequence", {"feature": {"type": "stranger_module.A", "content": {}}, "length": 3}),
        ["features.json with the class 'stranger_module.A'"],
      ),
      "a file of names": (
        as_text("class_label_feature.ClassLabel", {"names_file": str(secret)}),
        ["features.json with 'names_file', which names another file"],
      ),
      "a link to names": (None, ["label.labels.txt'", "a link out of this folder"]),
    }[how]  # fmt: skip
    if change is None:
      (folder / "label.labels.txt").unlink(missing_ok=True)
      (folder / "label.labels.txt").symlink_to(secret)
    else:
      (folder / "label.labels.txt").unlink(missing_ok=True)
      features["featuresDict"]["features"]["label"] = change
      (folder / "features.json").write_text(json.dumps(features))
    with one_sentence("data.path='tfds:like_mnist:1.0.0'", *parts):
      load("tfds:like_mnist:1.0.0", tmp_path / "cache", dir=str(tmp_path / "tfds"))
    assert not (tmp_path / "marker").exists()

  def test_the_newest_version_is_read_with_its_splits(self, prepared: Path, tmp_path: Path):
    found = load("tfds:like_mnist", tmp_path, dir=str(prepared))
    (part,) = found.parts
    assert (len(part.train), len(part.validation)) == (40, 20)
    assert found.class_names == tuple(map(str, range(10)))
    assert (found.model["image_size"], found.model["channels"], found.model["classes"]) == (28, 1, 10)
    for source, first in ((part.train, 0), (part.validation, 100)):
      read = source.read(np.arange(len(source)))
      assert (read["label"] == (read["image"][:, 0, 0, 0] - first) % 10).all()
      assert sorted(read["image"][:, 27, 27, 0].tolist()) == list(range(first, first + len(source)))

  @pytest.mark.parametrize("path, sizes", [
    ("tfds:like_mnist:1.9.0", (20, 10)), ("tfds:letters/upper", (20, 20)), ("tfds:letters/lower:1.0.0", (20, 20)),
    ("tfds:only_train", (57, 3)),
  ])  # fmt: skip
  def test_versions_configs_and_held_out_images(
    self, path: str, sizes: tuple[int, int], prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
  ):
    monkeypatch.setenv("TFDS_DATA_DIR", str(prepared))
    (part,) = load(path, tmp_path).parts
    assert (len(part.train), len(part.validation)) == sizes

  @pytest.mark.parametrize("path, parts", [
    ("tfds:mnist", ("is not in", "letters/lower, letters/upper, like_mnist, no_label", "data.dir", "TFDS_DATA_DIR")),
    ("tfds:like_mnist:2.0.0", ("use 1.0.0, 1.9.0, 1.10.0",)),
    ("tfds:letters", ("several configs", "tfds:letters/lower, tfds:letters/upper")),
    ("tfds:no_label", ("'label' (a ClassLabel)", "but has image", "use another data set")),
  ])  # fmt: skip
  def test_a_data_set_that_cannot_be_used(self, path: str, parts: tuple[str, ...], prepared: Path, tmp_path: Path):
    with one_sentence(f"data.path={path!r}", *parts):
      load(path, tmp_path, dir=str(prepared))

  def test_damaged_records(self, prepared: Path, tmp_path: Path):
    at = tmp_path / "like_mnist/1.0.0"
    at.mkdir(parents=True)
    for file in (prepared / "like_mnist/1.0.0").iterdir():
      (at / file.name).write_bytes(file.read_bytes()[: 100 if "array_record" in file.name else None])
    with one_sentence("data.path='tfds:like_mnist'", str(at), "prepare it again"):
      load("tfds:like_mnist", tmp_path / "cache", dir=str(tmp_path))


class TestBadInput:
  @pytest.mark.parametrize("name, arrays, parts", [
    ("missing", {"x_train": 1, "y_train": 2}, ("'image'", "'label'", "but holds 'x_train', 'y_train'", "rename")),
    ("floats", {"image": np.zeros((4, 4, 4)), "label": [0, 1, 0, 1]}, ("float64", "by 255", "uint8")),
    ("wide", {"image": np.zeros((4, 4, 4), int), "label": [0, 1, 0, 1]}, ("int64[4, 4, 4]", "convert")),
    ("flat", {"image": np.zeros((4, 16), "u1"), "label": [0, 1, 0, 1]}, ("uint8[4, 16]", "[N, S, S, 3]")),
    ("first", {"image": np.zeros((4, 3, 8, 8), "u1"), "label": [0, 1, 0, 1]}, ("uint8[4, 3, 8, 8]",)),
    ("names", {"image": np.zeros((2, 4, 4), "u1"), "label": ["a", "b"]}, ("'label' is <U1[2]",)),
    ("halves", {"image": np.zeros((2, 4, 4), "u1"), "label": [0.0, 1.0]}, ("'label' is float64[2]",)),
    ("short", {"image": np.zeros((3, 4, 4), "u1"), "label": [0, 1]}, ("'label' is int64[2]", "uint8[3, 4, 4]")),
    ("order", {"image": np.zeros((4, 4, 4), "u1").T, "label": [0, 1, 0, 1]}, ("Fortran", "ascontiguousarray")),
    ("negative", {"image": np.zeros((3, 4, 4), "u1"), "label": [0, 1, -1]}, ("the label -1", "from 0")),
    ("large", {"image": np.zeros((3, 4, 4), "u1"), "label": [0, 1, 1 << 32]}, ("the label 4294967296",)),
    ("from 1", {"image": np.zeros((3, 4, 4), "u1"), "label": [1, 2, 2]}, ("no image with label 0", "model.classes=3")),
    ("single", {"image": np.zeros((3, 4, 4), "u1"), "label": [0, 0, 0]}, ("a single class to train on, 0",)),
    ("alone", {"image": np.zeros((2, 4, 4), "u1"), "label": [0, 1]}, ("one image for each", "data.validation_path")),
    ("none", {"image": np.zeros((0, 4, 4), "u1"), "label": np.zeros(0, int)}, ("no images to train on",)),
  ])  # fmt: skip
  def test_arrays(self, name: str, arrays: dict[str, Any], parts: tuple[str, ...], tmp_path: Path):
    if name == "order":  # more than the transposed zeros of one byte, which are in both orders
      assert not arrays["image"].flags.c_contiguous
    np.savez(tmp_path / "a.npz", **arrays)
    with one_sentence(f"data.path={str(tmp_path / 'a.npz')!r}", *parts):
      load(str(tmp_path / "a.npz"), tmp_path / "cache")
    assert not [
      at for at in (tmp_path / "cache").iterdir() if at.is_dir() and at.name.startswith(".")
    ]  # nothing is left

  def test_arrays_that_are_no_archive_or_a_damaged_one(self, tmp_path: Path):
    (tmp_path / "a.npz").write_bytes(b"hello")
    with one_sentence("a.npz", "cannot be read as an .npz file", "np.savez"):
      load(str(tmp_path / "a.npz"), tmp_path / "cache")
    np.savez(tmp_path / "b.npz", image=noise(50, 8, 8), label=np.arange(50) % 2)
    content = bytearray((tmp_path / "b.npz").read_bytes())
    content[2000] ^= 1
    (tmp_path / "b.npz").write_bytes(content)
    with one_sentence("b.npz", "CRC", "np.savez"):
      load(str(tmp_path / "b.npz"), tmp_path / "cache")

  def test_a_label_outside_the_classes_of_the_model(self, tmp_path: Path):
    np.savez(tmp_path / "a.npz", image=noise(4, 4, 4), label=[0, 2, 0, 2])
    with one_sentence("model.classes=2", "the label 2", "use 3"):
      load(str(tmp_path / "a.npz"), tmp_path / "cache", model__classes=2)
    assert load(str(tmp_path / "a.npz"), tmp_path / "cache", model__classes=5).model["classes"] == 3  # a gap is allowed

  def test_a_class_that_is_only_in_validation(self, tmp_path: Path):
    np.savez(tmp_path / "a.npz", image=noise(4, 4, 4), label=[0, 1, 0, 1])
    np.savez(tmp_path / "b.npz", image=noise(2, 4, 4), label=[0, 2])
    with one_sentence("data.path=", "the class 2 to validate on", "none to train on"):
      load(str(tmp_path / "a.npz"), tmp_path / "cache", validation_path=str(tmp_path / "b.npz"))
    make_folder(tmp_path / "set/train", (4, 4), ant=2, bee=2)
    with one_sentence("data.path=", "the class 2 to validate on", "none to train on"):
      load(str(tmp_path / "set"), tmp_path / "cache", validation_path=str(tmp_path / "b.npz"))
    make_folder(tmp_path / "set/val", ant=1, wasp=1)
    with one_sentence("'wasp'", "no such class to train on"):
      load(str(tmp_path / "set"), tmp_path / "cache")

  def test_folders(self, tmp_path: Path):
    make_folder(tmp_path / "set", ant=2)
    with one_sentence("data.path=", "a single class to train on, 'ant'"):
      load(str(tmp_path / "set"), tmp_path / "cache")
    (tmp_path / "set/bee").mkdir()
    (tmp_path / "set/bee/x.heic").touch()
    with one_sentence("no images of the class 'bee'", str(tmp_path / "set/bee"), ".webp", "remove the folder"):
      load(str(tmp_path / "set"), tmp_path / "cache")
    with one_sentence("data.path=", "has no subfolders", "named after the class"):
      load(str(tmp_path / "set/bee"), tmp_path / "cache")
    make_folder(tmp_path / "split/train", ant=2, bee=2)
    make_folder(tmp_path / "split/test", ant=2)
    make_folder(tmp_path / "split/drafts", ant=2)
    with one_sentence("'train' and 'test', but also 'drafts'", "data.validation_path="):
      load(str(tmp_path / "split"), tmp_path / "cache")

  def test_images_that_differ_in_size_or_cannot_be_decoded(self, tmp_path: Path):
    make_folder(tmp_path / "set", ant=3, bee=3)
    odd = save(tmp_path / "set/bee/odd.png", noise(8, 9, 3))
    with one_sentence(f"{str(tmp_path / 'set/ant/000.png')!r} is 8×8", f"{str(odd)!r} is 9×8", "set data.resize"):
      load(str(tmp_path / "set"), tmp_path / "cache")
    content = save(odd, noise(8, 8, 3)).read_bytes()
    for damaged in (b"not an image", content[:100]):
      odd.write_bytes(damaged)
      with one_sentence(repr(str(odd)), "cannot be read as an image", "take it out"):
        load(str(tmp_path / "set"), tmp_path / "cache")
    odd.unlink()
    save(tmp_path / "set/bee/float.tiff", np.ones((8, 8), np.float32))
    with one_sentence("float.tiff", "floating-point"):
      load(str(tmp_path / "set"), tmp_path / "cache")

  @pytest.mark.parametrize("path, parts", [
    ("", ("data.path='' names no images", "tfds:NAME")),
    ("nowhere", ("data.path='nowhere' does not exist", ".npz")),
    (__file__, ("is a file of another kind", ".npz")),
    ({"a": -1}, ("data.path", "-1")),
  ])  # fmt: skip
  def test_paths(self, path: Any, parts: tuple[str, ...], tmp_path: Path):
    with one_sentence(*parts):
      load(path, tmp_path)

  def test_sources_that_do_not_go_together(self, tmp_path: Path):
    for name, shape, classes in [
      ("a", (8, 8, 3), 2), ("small", (4, 4, 3), 2), ("grey", (8, 8), 2), ("more", (8, 8, 3), 3), ("same", (8, 8, 3), 2)
    ]:  # fmt: skip
      np.savez(tmp_path / f"{name}.npz", image=noise(6, *shape), label=np.arange(6) % classes)
    make_folder(tmp_path / "x", ant=3, bee=3)
    make_folder(tmp_path / "y", ant=3, wasp=3)
    both = lambda *names: {str(tmp_path / name): 1 for name in names}
    for names, parts in [
      (("a.npz", "small.npz"), ("8 and 4 pixels", "data.resize")),
      (("a.npz", "grey.npz"), ("grey and color", "convert")),
      (("a.npz", "more.npz"), ("a.npz' has 2 classes", "more.npz' has 3", "model.classes=3")),
      (("x", "y"), ("different classes", "'bee' is in one only")),
    ]:
      with one_sentence(*(f"data.path={str(tmp_path / name)!r}" for name in names), *parts):
        load(both(*names), tmp_path / "cache")
    assert load(both("a.npz", "more.npz"), tmp_path / "cache", model__classes=3).model["classes"] == 3
    assert load(both("a.npz", "x"), tmp_path / "cache").class_names == ("ant", "bee")
    with one_sentence("data.validation_path='v'", "single source"):
      load(both("a.npz", "same.npz"), tmp_path / "cache", validation_path="v")

  def test_a_source_that_changes_while_it_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_folder(tmp_path / "set", ant=3, bee=3)
    last = tmp_path / "set/bee/002.png"
    for change in (lambda: os.utime(last, ns=(0, 0)), lambda: save(tmp_path / "set/bee/new.png", noise(8, 8, 3))):
      with monkeypatch.context() as patch:
        patch.setattr(store, "pixels", lambda *given, change=change: (change(), pixels(*given))[1])
        with one_sentence(f"data.path={str(tmp_path / 'set')!r} has changed", "run again"):
          load(str(tmp_path / "set"), tmp_path / "cache")
    monkeypatch.setattr(store, "pixels", lambda *given: (last.unlink(missing_ok=True), pixels(*given))[1])
    with one_sentence(str(last), "cannot be read"):
      load(str(tmp_path / "set"), tmp_path / "cache")


class TestPreparation:
  def test_images_are_decoded_only_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written = make_folder(tmp_path / "set", ant=3, bee=3)
    load(str(tmp_path / "set"), tmp_path / "cache")
    with monkeypatch.context() as patch:
      patch.setattr(store, "pixels", None)
      (part,) = load(str(tmp_path / "set"), tmp_path / "cache").parts
    image = noise(8, 8, 3)
    save(tmp_path / "set/ant/new.png", image)
    (part,) = load(str(tmp_path / "set"), tmp_path / "cache").parts
    assert set(content(part.train) | content(part.validation)) == {*written, image.tobytes()}

  @pytest.mark.full
  @pytest.mark.parametrize("form", ["folder", "npz"])
  def test_a_killed_preparation_goes_on_where_it_was(self, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The result has the same bytes as that of a preparation that nobody disturbs."""
    monkeypatch.setattr(store, "CHUNK_IMAGES", 4)
    path = tmp_path / ("set" if form == "folder" else "a.npz")
    make_folder(tmp_path / "set", ant=20, bee=30)
    np.savez_compressed(tmp_path / "a.npz", image=noise(50, 8, 8), label=np.arange(50) % 2)
    load(str(path), tmp_path / "undisturbed")

    # Images until the kill, including the one whose shape is looked at first. The first kill is within the third chunk,
    # the second one when the fourth more is in the file, but not yet saved.
    for decoded in (11, 17):
      killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(path), str(tmp_path / "killed"), str(decoded)], cwd=ROOT
      )
      assert killed.returncode == -signal.SIGKILL
      (left,) = [at for at in (tmp_path / "killed").iterdir() if at.is_dir()]
      assert left.name.startswith(".")  # nobody takes it for a prepared one
    calls = itertools.count()
    monkeypatch.setattr(store, "pixels", lambda *given: (next(calls), pixels(*given))[1])
    load(str(path), tmp_path / "killed")
    assert next(calls) == 1 + 50 - 8 - 12  # those saved are not decoded again

    undisturbed, resumed = (
      {file.name: file.read_bytes() for file in next((tmp_path / cache).glob("images-*")).iterdir()}
      for cache in ("undisturbed", "killed")
    )
    assert resumed == undisturbed
    assert set(resumed) == {"train.images", "train.labels", "validation.images", "validation.labels", "meta.json"}


KILLED = """
import os, signal, sys
sys.path.insert(0, ".")
from pathlib import Path
import data.images
import train
from configs import base
from data.images import store

path, cache, left = sys.argv[1], sys.argv[2], int(sys.argv[3])
store.CHUNK_IMAGES, store.SAVE_SECONDS, store.THREADS = 4, 0, 1
original = store.pixels

def pixels(*given):
  global left
  left -= 1
  if left < 0:
    os.kill(os.getpid(), signal.SIGKILL)
  return original(*given)

def fsync(descriptor):
  if left == 0:
    os.kill(os.getpid(), signal.SIGKILL)

store.pixels, os.fsync = pixels, fsync
config = base.get_config("images")
config.data.update(path=path, cache_dir=cache)
data.images.load(config)
"""


class TestTraining:
  @pytest.mark.full
  @pytest.mark.parametrize("form, size, channels, patch", [("npz", 28, 1, 4), ("folder", 64, 3, 16)])
  def test_a_model_learns_the_classes_of_images_of_any_size(
    self, form: str, size: int, channels: int, patch: int, tmp_path: Path
  ):
    """Every fourth row of an image is brighter; the class is the first such row. The data determines the sizes."""
    labels = np.random.default_rng(1).permutation(np.arange(160) % 4)
    images = noise(160, size, size, 3) // 2
    for image, label in zip(images, labels, strict=True):
      image[label::4] += 100
    if form == "npz":
      np.savez(path := tmp_path / "digits.npz", image=images[..., 0], label=labels)
    else:
      for i, image in enumerate(images):
        save((path := tmp_path / "photos") / "abcd"[labels[i]] / f"{i}.png", image)
    small = {"width": 32, "depth": 1, "heads": 4, "kv_heads": 4, "mlp_width": 32, "patch_size": patch}
    fields = {f"model__{name}": x for name, x in small.items()} | {"data__augment": False, "optimizer__warmup": 2}
    steps = {"steps": 12, "batch_size": 16, "eval_batch_size": 8, "log_every": 1}
    cache = str(tmp_path / "cache")
    changed = config("fsdp", preset="images", data__path=str(path), data__cache_dir=cache, **fields, **steps)
    changed.optimizer.learning_rate = 1e-2

    result = train.train(changed, tmp_path / "run")
    model = json.loads((tmp_path / "run/config.json").read_text())["model"]
    assert (model["image_size"], model["channels"], model["classes"]) == (size, channels, 4)
    losses = [line["loss"] for line in measured(tmp_path / "run") if line["split"] == "train"]
    assert losses[0] > 1  # a uniform guess gives ln 4 = 1.39
    assert losses[-1] < 0.2
    assert result["accuracy"] == 1
    assert result["examples"] == 8  # 1 in 20
