"""Decodes one image with Pillow."""

import contextlib
import io
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from errors import ConfigError, first_line

Encoded = str | bytes | np.ndarray  # the path of a file, the content of a file, or pixels uint8 [H, W] or [H, W, 3]


def pixels(encoded: Encoded, where: str, channels: int, resize: int = 0) -> np.ndarray:
  """The pixels of an image, uint8 [H, W, C], with 1 channel (grey) or 3 (red, green, blue).

  Photographs are turned upright. Transparency is dropped, and of 16 bits the upper 8 are kept. With `resize`, the
  shorter side is scaled to that many pixels, and the middle is cut out. `where` names the image in errors.
  """
  with _opened(encoded, where) as image:
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode == "F":
      raise ValueError("its pixels are floating-point numbers")
    if image.mode.startswith("I"):  # Pillow's own conversion would clip at 255
      image = Image.fromarray((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:  # otherwise Pillow warns
      image = image.convert("RGBA")
    image = image.convert("L" if channels == 1 else "RGB")
    if resize:
      image = ImageOps.fit(image, (resize, resize))  # bicubic, with antialiasing
    return np.asarray(image).reshape(image.height, image.width, channels)


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
    with Image.open(io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded) as image:
      yield image
  except Exception as error:  # of many types: Pillow has a decoder for each format
    reason = "unknown format" if isinstance(error, UnidentifiedImageError) else first_line(error)
    raise ConfigError(
      f"{where!r} cannot be read as an image ({reason}); repair it or take it out of the data"
    ) from error
