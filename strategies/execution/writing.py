"""Writing: the programs that write and score texts, compiled for a strategy's mesh.

models/generate.py says how a text is written. Here each of its functions becomes a jitted program.
"""

import functools

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.generate import Sampling, Texts, generate, text_keys
from strategies.execution.mesh import on_mesh
from strategies.execution.padding import Stored
from strategies.execution.runner import Runner
from training.program import Params


class Writing:
  """Writes texts, and scores given texts. Scoring shards the batch; generation does not."""

  def __init__(self, runner: Runner, mesh: Mesh | AbstractMesh, stored: Stored):
    self.mesh = mesh
    replicated, sharding = NamedSharding(mesh, P()), runner.sharding
    text_writer = lambda params, *given, **places: runner.text_writer(stored.cut(params), *given, **places)
    writer = functools.partial(text_writer, sharding=sharding.place(batch=None, sequence=None))
    self._generate = jax.jit(
      lambda params, sampling, prompt, seed, length: generate(
        writer(params, sampling), prompt, length=length, key=jax.random.key(seed)
      ),
      static_argnums=(1, 4),
      out_shardings=replicated,
    )
    self._begin_texts = jax.jit(
      lambda params, sampling, prompts, lengths, seed, size: writer(params, sampling).begin(
        prompts, lengths, text_keys(jax.random.key(seed), len(prompts)), size=size
      ),
      static_argnums=1,
      static_argnames="size",
    )
    self._go_on = jax.jit(
      lambda params, sampling, cache, rest: writer(params, sampling).extend(rest._replace(cache=cache)),
      static_argnums=1,
      donate_argnums=2,
    )
    # Given texts have any length, so their positions stay whole.
    by_rows = sharding.place(sequence=None)
    self._log_likelihoods = jax.jit(
      lambda params, *texts: text_writer(params, Sampling(), by_rows).log_likelihoods(*texts),
      out_shardings=replicated,
    )

  def generate(self, params: Params, prompt: np.ndarray, *, length: int, seed: int, temperature: float) -> jax.Array:
    """Continues prompts [B, P] by `length` tokens → [B, P + length], replicated."""
    with on_mesh(self.mesh):
      return self._generate(params, Sampling(temperature=temperature), prompt, np.int64(seed), length)

  def begin(
    self, params: Params, prompts: np.ndarray, lengths: np.ndarray, *, size: int, seed: int, sampling: Sampling
  ) -> Texts:
    """`TextWriter.begin`: reads prompts [B, P], padded at the right, and writes the first token of each."""
    with on_mesh(self.mesh):
      return self._begin_texts(params, sampling, prompts, lengths, np.int64(seed), size=size)

  def extend(self, params: Params, texts: Texts, sampling: Sampling) -> Texts:
    """Writes one more token of each text. Donates the cache, so `texts` cannot be continued again."""
    with on_mesh(self.mesh):
      return self._go_on(params, sampling, texts.cache, texts._replace(cache=None))

  def log_likelihoods(self, params: Params, tokens: np.ndarray, counted: np.ndarray) -> jax.Array:
    """`TextWriter.log_likelihoods` → [B], replicated. B must be a multiple of the devices that split the batch."""
    with on_mesh(self.mesh):
      return self._log_likelihoods(params, tokens, counted)
