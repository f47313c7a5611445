"""An unexpected all-gather: make one, find its line, and fix it.

The second lesson of docs/debugging.md. Next: causes.py.
"""

import difflib
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import strategies
from configs import base
from lab.analysis.compiled import metadata_in_cache_key
from lab.analysis.explanation import explain
from lab.benchmarks.pages import ROOT
from lab.lessons.origins import print_origins
from lab.views.communication import communication
from strategies.execution.constraints import Constraints
from training import settings


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
  `print_origins` ([`lab/lessons/origins.py`](../lab/lessons/origins.py)) therefore shows the lines on both sides.
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


def in_a_strategy():
  """In a strategy of this repository

  The model pins its activations with `sharding.activation`. One pin is on the embedding table, in `models/inputs.py`:
  it says that the table is whole along the width when tokens are looked up. Below, `fsdp` runs without this pin.

  `tools.explain` prints what a step sends, and `tests/golden/explain` keeps such a page for each strategy. A test
  compares it with the compiler's program. So a lost constraint fails the test, with the lines that differ: these.

  The table's gradient was all-reduced. Now it is not, but there is an all-to-all, and one more all-gather. Without the
  pin the compiler leaves the table split by columns, as it is stored. Each device then adds up some columns for the
  tokens of *all* devices, and needs their ids and their gradients. In this small example that sends fewer bytes. But it
  grows with the batch, and gradients of the table do not.

  `explain` has the scope of every collective, and the all-to-all's says where to look: in the backward pass of `embed`.
  """
  config = base.get_config("tiny", "fsdp")
  strategy = strategies.create(base.get_config("tiny", "fsdp"), settings.program(config, "cpu"), jax.devices())
  pin = Constraints.activation
  without = lambda self, x, *dims: x if dims == ("vocab", None) else pin(self, x, *dims)
  with mock.patch.object(Constraints, "activation", without):
    found = explain("fsdp", strategy, batch_size=32)
  golden = ROOT / "tests/golden/explain/fsdp.txt"
  tables = golden.read_text().split("\n\n")[3], communication(found).partition("\n\n")[0]
  changes = [line for line in difflib.ndiff(*(table.splitlines() for table in tables)) if line[0] in "-+"]
  print("  " + communication(found).splitlines()[0], *changes, sep="\n")
  scopes = {row["kind"]: row["scopes"] for row in found["communication"]}
  print("all-to-all:", *scopes["all-to-all"])
  return {"changes": changes, "found": found}


STEPS = (a_merged_dimension, fixed, in_a_strategy)
