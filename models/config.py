"""The shape of a Transformer, checked, and the arithmetic a training step of it costs."""

import dataclasses

from errors import ConfigError, one_of, positive

ATTENTION = ("auto", "plain", "blockwise", "cudnn")
REMAT = ("none", "dots", "full")
INPUTS = ("tokens", "images")
DTYPES = ("float32", "bfloat16")  # float16 would need its loss scaled


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Sizes are numbers of elements. `configs/base.py` explains each field and holds the defaults."""

  inputs: str
  width: int
  depth: int
  heads: int
  kv_heads: int
  mlp_width: int
  seq_len: int
  vocab_size: int
  tied_embedding: bool
  dropout: float
  rope_base: float
  norm_eps: float
  attention: str
  remat: str
  dtype: str  # of activations and of the weights as used; the master weights have `param_dtype`
  param_dtype: str
  image_size: int
  patch_size: int
  classes: int

  def __post_init__(self) -> None:
    one_of("model.inputs", self.inputs, INPUTS)
    one_of("model.attention", self.attention, ATTENTION)
    one_of("model.remat", self.remat, REMAT)
    one_of("model.dtype", self.dtype, DTYPES)
    one_of("model.param_dtype", self.param_dtype, DTYPES)
    sizes = ("width", "depth", "heads", "kv_heads", "mlp_width", "seq_len", "vocab_size")
    for name in (*sizes, "image_size", "patch_size", "classes", "rope_base"):
      positive(f"model.{name}", getattr(self, name))
    if self.width % (2 * self.heads):
      raise ConfigError(
        f"model.heads={self.heads} does not divide model.width={self.width} into heads of an even size; "
        "rotary embedding turns pairs, so make width a multiple of 2 × heads"
      )
    if self.heads % self.kv_heads:
      raise ConfigError(
        f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}; "
        f"use {' or '.join(str(k) for k in range(1, self.heads + 1) if self.heads % k == 0)}"
      )
    if not 0 <= self.dropout < 1:
      raise ConfigError(f"model.dropout={self.dropout} is not a probability below 1; use 0 to switch it off")
    if self.is_image and self.image_size % self.patch_size:
      raise ConfigError(f"model.patch_size={self.patch_size} does not divide the image size {self.image_size}")
    if self.is_image and self.head_size % 4:
      raise ConfigError(
        f"model.heads={self.heads} makes heads of size {self.head_size}, but images need a multiple of 4 "
        "(rotary embedding turns pairs along rows and along columns); use fewer heads or a larger width"
      )

  @property
  def is_image(self) -> bool:
    return self.inputs == "images"

  @property
  def head_size(self) -> int:
    return self.width // self.heads

  @property
  def positions(self) -> int:
    """Length of the sequence the blocks see: tokens of a text, patches of an image."""
    return (self.image_size // self.patch_size) ** 2 if self.is_image else self.seq_len

  @property
  def unit(self) -> tuple[str, int]:
    """What throughput counts, and how many of them an example is."""
    return ("images", 1) if self.is_image else ("tokens", self.seq_len)

  def sizes(self) -> list[tuple[str, str, int]]:
    """(logical axis, config field, size) of all that a layout may have to split evenly."""
    sizes = [
      ("embed", "model.width", self.width),
      ("heads", "model.heads", self.heads),
      ("heads", "model.kv_heads", self.kv_heads),
      ("mlp", "model.mlp_width", self.mlp_width),
      ("layers", "model.depth", self.depth),
    ]
    return sizes if self.is_image else [*sizes, ("vocab", "model.vocab_size", self.vocab_size)]

  def train_flops_per_example(self) -> float:
    """Floating-point operations of one forward and backward pass over one example.

    6 per weight and position for the matrix products (the embedding lookup is none) and 12 · T · width per position
    and block for attention, causal or not, as in PaLM (arXiv:2204.02311, appendix B). Recomputation by remat is not
    counted, so MFU and not "hardware FLOPs utilisation" is what it gives.
    """
    t = self.positions
    block = self.width * self.head_size * (2 * self.heads + 2 * self.kv_heads) + 3 * self.width * self.mlp_width
    if self.is_image:
      edge = self.patch_size**2 * 3 * self.width + self.classes * self.width / t
    else:
      edge = self.width * self.vocab_size
    return t * (6 * (self.depth * block + edge) + 12 * self.depth * t * self.width)
