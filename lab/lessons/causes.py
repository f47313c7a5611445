"""Common causes: what makes a compiler send what nobody asked for, each seen to happen.

The third lesson of docs/debugging.md.
"""

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lab.analysis.communication import collectives
from lab.analysis.hlo import parse


def causes():
  """Programs that send

  Each program below is an operation or two, on a mesh of four devices along `data` and two along `model`. The indented
  lines are the same computation without the cause. What to do instead:

  - **Merge and cut dimensions** only where the split dimension is the first of those merged, and where the pieces stay
    whole. Split heads, not the numbers within a head, and make the count of heads a multiple of the devices.
  - **Loop** over a dimension that is not split. A scan needs one slice at a time, on all devices.
  - **Slices** of a split dimension are on the wrong devices. Give the parts a dimension of their own, as `[2, F]` for
    the two halves of a gated MLP.
  - **Joining, cumulative sums and top_k** need their dimension whole. Split another one, or work in two steps: in each
    piece first, then on the few results of the pieces. top_k even gathers the rows, at least on CPUs.
  - **Two operands that disagree** make the compiler move one of them, often the smaller. Say which one, with a
    constraint. With `Explicit` mesh axes this is an error instead ([the tour](tour-four-ways.md#5-where-they-differ)).
  - **A size that does not divide** is an error for an array. Within a program the last piece is shorter. But where a
    result leaves the program, as here, the compiler gives up the constraint without a word: it is whole on all devices.
    Choose sizes that divide, or pad at the border ([how](strategies.md#devices-that-do-not-divide)).
  - **A value that is wanted whole**, by a constraint, by `out_shardings`, by `print` or by a checkpoint of one process,
    is gathered. Look whether all of it is needed.
  """
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  split, rows, result = P("data", "model"), P("data"), {}
  one_row = lambda sum, row: (sum + row, sum)
  for name, function, *arrays in (
    ("merge dimensions, the second one split", lambda x: x.reshape(8, 16), ((8, 4, 4), P("data", None, "model"))),
    ("  the first one split", lambda x: x.reshape(8, 16), ((8, 4, 4), P("data", "model", None))),
    ("cut a dimension in three, on two devices", lambda x: x.reshape(8, 3, 2), ((8, 6), split)),
    ("scan over a split dimension", lambda x: jax.lax.scan(one_row, jnp.zeros(16), x), ((8, 16), rows)),
    ("index a split dimension at a traced place", lambda x, i: x[i], ((8, 16), rows), ((), P())),
    ("take halves of a split dimension", lambda x: x[:, :8] * x[:, 8:], ((8, 16), split)),
    ("  halves with a dimension of their own", lambda x: x[:, 0] * x[:, 1], ((8, 2, 8), P("data", None, "model"))),
    ("join along a split dimension", lambda x, y: jnp.concatenate([x, y], 1), ((8, 16), split), ((8, 16), split)),
    ("sum as you go along a split dimension", lambda x: jnp.cumsum(x, 1), ((8, 16), split)),
    ("pick the largest few along it", lambda x: jax.lax.top_k(x, 2)[0], ((8, 16), split)),
    ("combine two dimensions over one axis", lambda x, y: x + y, ((8, 16), P("data")), ((8, 16), P(None, "data"))),
    ("multiply, both split over one axis", lambda x, w: x @ w, ((16, 8), P("data")), ((8, 32), P(None, "data"))),
    ("constrain 7 rows over 4 devices", lambda x: constrain(x[:7], P("data")), ((8, 16), rows)),
    ("want a split value whole", lambda x: constrain(jnp.tanh(x), P()), ((8, 16), rows)),
  ):
    dtype = lambda shape: jnp.float32 if shape else jnp.int32
    placed = [jax.ShapeDtypeStruct(s, dtype(s), sharding=NamedSharding(mesh, spec)) for s, spec in arrays]
    with jax.set_mesh(mesh):
      program = jax.jit(function).lower(*placed).compile()
    found = collectives(parse(program.as_text()), dict(mesh.shape))
    sent = [f"{one.kind} over {'+'.join(one.axes)}, {one.sent:,.0f} bytes" for one in found]
    print(f"{name}:", "; ".join(sent) or "nothing")
    result[name.strip()] = found
  return result


STEPS = IN_FILE = (causes,)
