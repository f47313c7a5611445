"""Decodes one image with Pillow."""

import contextlib
import functools
import io
import threading
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

import limits
from errors import ConfigError, first_line

# Not EPS, for which Pillow starts another program; and not what only a guess recognises.
FORMATS = (
  "PNG", "JPEG", "BMP", "GIF", "PPM", "WEBP", "TIFF", "AVIF", "JPEG2000", "DIB", "ICO", "ICNS", "PCX", "SGI", "DDS",
  "PSD", "QOI",
)  # fmt: skip
Image.MAX_IMAGE_PIXELS = None  # of all of Python: a limit of its own, which no field raises
Encoded = str | bytes | np.ndarray  # the path of a file, the content of a file, or pixels uint8 [H, W] or [H, W, 3]


class _Room:
  """Lets images with so many pixels in all be decoded at the same time, in any number of threads."""

  def __init__(self) -> None:
    self._changed, self._used = threading.Condition(), 0

  @contextlib.contextmanager
  def taken(self, count: int, limit: int) -> Iterator[None]:
    with self._changed:
      self._changed.wait_for(lambda: not self._used or self._used + count <= limit)
      self._used += count
    try:
      yield
    finally:
      with self._changed:
        self._used -= count
        self._changed.notify_all()


_room = _Room()


def pixels(encoded: Encoded, where: str, channels: int, resize: int = 0, limit: int = limits.ROW) -> np.ndarray:
  """The pixels of an image, uint8 [H, W, C], with 1 channel (grey) or 3 (red, green, blue).

  Photographs are turned upright. Transparency is dropped, and of 16 bits the upper 8 are kept. With `resize`, the
  shorter side is scaled to that many pixels, and the middle is cut out. `where` names the image in errors. It has at
  most `limit` pixels.
  """
  with _opened(encoded, where) as image, _room.taken(_count(image, where, limit), limit):
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode == "F":
      raise ValueError("its pixels are floating-point numbers")
    if image.mode.startswith("I"):  # Pillow's own conversion would clip at 255
      image = Image.fromarray((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:  # otherwise Pillow warns
      image = image.convert("RGBA")
    if image.mode != (wanted := "L" if channels == 1 else "RGB"):  # `convert` would copy it
      image = image.convert(wanted)
    if resize:
      image = ImageOps.fit(image, (resize, resize))  # bicubic, with antialiasing
    return np.asarray(image).reshape(image.height, image.width, channels)


@functools.cache
def _formats() -> list[str]:
  """Those of FORMATS that this Pillow has."""
  Image.init()
  return [name for name in FORMATS if name in Image.OPEN]


def _count(image: Image.Image, where: str, limit: int) -> int:
  """The pixels of an image. Raises ConfigError if there are more than the limit."""
  count = image.width * image.height
  limits.check(f"{where!r}", count, limit, "pixels")
  return count


def is_grey(encoded: Encoded, where: str) -> bool:
  """Whether an image has no colors. Reads no pixels, so a color image with grey pixels only counts as color."""
  with _opened(encoded, where) as image:
    if image.mode == "P":
      palette = np.array(image.getpalette("RGB")).reshape(-1, 3)
      return bool((palette == palette[:, :1]).all())
    return image.mode in ("1", "L", "LA", "F") or image.mode.startswith("I")


@contextlib.contextmanager
def _opened(encoded: Encoded, where: str) -> Iterator[Image.Image]:
  """Opens an image. Raises ConfigError, which names the image, if that or anything in the block fails."""
  try:
    if isinstance(encoded, np.ndarray):
      yield Image.fromarray(encoded)
      return
    with Image.open(io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded, formats=_formats()) as image:
      yield image
  except ConfigError:
    raise
  except Exception as error:  # of many types: Pillow has a decoder for each format
    reason = "unknown format" if isinstance(error, UnidentifiedImageError) else first_line(error)
    raise ConfigError(
      f"{where!r} cannot be read as an image ({reason}); repair it or take it out of the data"
    ) from error
