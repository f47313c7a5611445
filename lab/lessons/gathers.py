"""An unexpected all-gather: make one, find its line, and fix it.

The second lesson of docs/debugging.md. Next: causes.py.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lab.analysis.compiled import metadata_in_cache_key
from lab.lessons.sent import print_origins


def features(x, heads_of, constrain=lambda w: w):
  """Projects x [B, T, D] to heads [B, T, H, K], and merges the heads."""
  heads = jnp.einsum("btd,dhk->bthk", x, constrain(heads_of))
  return jnp.tanh(heads.reshape(*x.shape[:2], -1))


def compiled(spec, constrain=lambda w: w):
  """The program, with the weights `heads_of` [D, H, K] sharded by a spec, and its mesh."""
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  sized = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
  arrays = sized((16, 8, 32), P("data")), sized((32, 4, 4), spec)
  with jax.set_mesh(mesh), metadata_in_cache_key():
    return jax.jit(lambda x, heads_of: features(x, heads_of, constrain)).lower(*arrays).compile(), mesh


def a_merged_dimension():
  """Make one, and find its line

  A product makes four heads for each position, and a reshape merges their two dimensions, H and K. The devices along
  `model` split K: each has one half of *every* head. In the merged dimension these halves alternate, and no spec can
  say that. So the compiler first gathers the heads. Each device then has all of them, and both devices along `model` do
  the same work from there on. Nothing warns of this.

  To find the line, look at the metadata of the instruction in the compiled text. `op_name` has the scopes
  (`jax.named_scope`) and the primitive. `stack_frame_id` leads to the file and line, through tables at the top of the
  text. (Older versions of JAX write `source_file` and `source_line` into each instruction.) But no line asks for this
  gather. The compiler added it, with the metadata of a neighbour. jax 0.10 takes those of the operation that needs the
  result, here the reshape. jax 0.12 takes those of the operation that made the operand, here the einsum.
  `print_origins` ([`lab/analysis/origins.py`](../lab/analysis/origins.py)) therefore shows the lines on both sides.
  The analysis of this repository reads `op_name` alone, to name the part of the model (`lab/analysis/profile.py`).

  There is a trap: the compilation cache ignores metadata, so a program that comes from it may name the lines of an
  older version of your code. Set `jax_compilation_cache_include_metadata_in_key`, as `metadata_in_cache_key` does.
  """
  program, mesh = compiled(P(None, None, "model"))
  print("result:", program.output_shardings.spec)
  return {"output": program.output_shardings, "origins": print_origins(program, mesh)}


def fixed():
  """Fix it

  If the devices split H, each has a contiguous half of the merged dimension, and nothing must be gathered. A constraint
  can say so: on the heads, or on the weight that makes them. Here it is on the weight, the smaller of the two. An
  all-to-all moves the weight, and the result stays split. Better still, store the weight in this way from the start.
  Then nothing is sent.

  Ask of every collective that you did not expect: which dimension is split before it, and which one after it? Then
  decide who gives way: the sharding of an input, a constraint between them, or the order of the dimensions.
  """
  by_heads = P(None, "model", None)
  by_constraint = lambda w: jax.lax.with_sharding_constraint(w, by_heads)
  result = {}
  for name, *how in (("constraint", P(None, None, "model"), by_constraint), ("stored by heads", by_heads)):
    program, mesh = compiled(*how)
    print(f"{name}; result:", program.output_shardings.spec)
    result[name] = {"output": program.output_shardings, "origins": print_origins(program, mesh)}
  return result


STEPS = (a_merged_dimension, fixed)
