"""Changes training images at random, each with a key of its own, so that it is the same under every layout."""

import jax
import jax.numpy as jnp

PADDING = 4  # pixels on each side, by which crops move


def crop_and_flip(images: jax.Array, keys: jax.Array) -> jax.Array:
  """Shifts each image [B, S, S, C] by up to 4 pixels, fills the border with black, and mirrors half of the images.

  `keys` [B] holds a key for each image.
  """

  def one(image: jax.Array, key: jax.Array) -> jax.Array:
    row, column, flip = jax.random.randint(key, (3,), 0, jnp.array([2 * PADDING + 1, 2 * PADDING + 1, 2]))
    padded = jnp.pad(image, ((PADDING, PADDING), (PADDING, PADDING), (0, 0)))
    crop = jax.lax.dynamic_slice(padded, (row, column, 0), image.shape)
    return jnp.where(flip == 1, crop[:, ::-1], crop)

  return jax.vmap(one)(images, keys)
