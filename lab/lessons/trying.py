"""What to try after a step of the tour: cells of the notebook that are there to be changed.

A cell uses what the notebook has defined before it. Its text suggests a change, and a test makes that change and reads
what it shows (tests/lab/test_notebook.py).
"""

from typing import NamedTuple


class Try(NamedTuple):
  """Something to try.

  Attributes:
    text: what to change, and what to look at.
    code: the cell to change.
    change: a part of the code, and what to put in its place.
    shows: a part of what the changed cell prints.
  """

  text: str
  code: str
  change: tuple[str, str]
  shows: str


AFTER = {  # by the name of the step
  "devices": Try(
    "Put `y` on device 5, too. Where is the sum then? While the two are on different devices, JAX refuses to add them, "
    "because it moves no data unasked.",
    """\
x, y = (jax.device_put(jnp.arange(4.0), jax.devices()[n]) for n in (5, 6))
try:
  total = x + y
  print("the sum is on device", *[device.id for device in total.devices()])
except ValueError:
  print("ValueError")""",
    ("(5, 6)", "(5, 5)"),
    "the sum is on device 5",
  ),
  "meshes": Try(
    "Swap the sizes. Which devices share a row now?",
    """\
mesh = jax.make_mesh((4, 2), ("data", "model"))
print(mesh.device_ids)""",
    ("(4, 2)", "(2, 4)"),
    "[[0 1 2 3]\n [4 5 6 7]]",
  ),
  "along_an_axis": Try(
    'Add up along both axes, `("data", "model")`, with `P()` for the result. Every device then has 0 + 1 + ... + 7.',
    """\
mesh = jax.make_mesh((4, 2), ("data", "model"))
numbers = jax.device_put(jnp.arange(8).reshape(4, 2), NamedSharding(mesh, P("data", "model")))
add, result = "model", P("data", None)
sums = jax.shard_map(
  lambda mine: jax.lax.psum(mine, add), mesh=mesh, in_specs=P("data", "model"), out_specs=result
)(numbers)
print(sums)""",
    ('"model", P("data", None)', '("data", "model"), P()'),
    "[[28]]",
  ),
  "one_device": Try(
    "Give the mesh of `two_d` other sizes, or another number of devices. Which are refused, and with which sentence?",
    """\
try:
  print(dict(resolve(strategies.layout_of("two_d"), 8, {"model": 4}).mesh))
except ConfigError as error:
  print(error)""",
    ('{"model": 4}', '{"model": 3}'),
    "mesh.model=3",
  ),
  "specs": Try(
    "Split the columns over both axes, and leave the rows whole. How large is a piece?",
    """\
mesh = jax.make_mesh((4, 2), ("data", "model"))
x = jax.device_put(jnp.zeros((8, 16)), NamedSharding(mesh, P("data", "model")))
print(picture(x.sharding, x.shape))""",
    ('P("data", "model")', 'P(None, ("data", "model"))'),
    "8 pieces of (8, 2)",
  ),
  "a_batch": Try(
    "Split the batch over both axes. How many examples does a device have, and how many copies of each are there?",
    """\
mesh = jax.make_mesh((4, 2), ("data", "model"))
batch = jax.device_put(np.arange(16).reshape(8, 2), NamedSharding(mesh, P("data")))
for shard in batch.addressable_shards[:2]:
  print(f"device {shard.device.id}, replica {shard.replica_id}: rows {shard.data.tolist()}")""",
    ('P("data")', 'P(("data", "model"))'),
    "device 1, replica 0: rows [[2, 3]]",
  ),
  "uneven_batch": Try(
    "Read the same 13 examples in batches of 16. How many are padding, and what changes in the result?",
    """\
loss = count = 0
for batch in EvaluationBatches(Thirteen(), size=8).all():
  loss, count = loss + np.sum(batch["x"] * batch["mask"]), count + np.sum(batch["mask"])
  print("mask", batch["mask"].astype(int))
print(f"{loss / count:.4f}")""",
    ("size=8", "size=16"),
    "mask [1 1 1 1 1 1 1 1 1 1 1 1 1 0 0 0]\n50.0000",
  ),
  "resharding": Try(
    "Choose two specs of your own, and guess what is sent before you run the cell. For example, split the rows over "
    "both axes afterwards.",
    """\
before, after = P("data", None), P(None, None)
mesh = jax.make_mesh((4, 2), ("data", "model"))
with jax.set_mesh(mesh):
  x = jax.device_put(jnp.zeros((16, 16)), before)
  program = jax.jit(lambda x: jax.reshard(x, after)).lower(x).compile()
sent = print_sent(program, mesh)""",
    ("P(None, None)", 'P(("data", "model"), None)'),
    "sends: nothing",
  ),
  "by_the_compiler": Try(
    "Split nothing but the batch, so `w1` and `w2` are whole. Does the compiler still need to send something?",
    """\
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
split = P("data"), P(None, "model"), P("model")
placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays(), split, strict=True)]
sent = print_sent(jax.jit(plain).lower(*placed).compile(), mesh)""",
    ('P(None, "model"), P("model")', "P(), P()"),
    "sends: nothing",
  ),
  "with_constraints": Try(
    "Ask for a result that is split over `model`, too. The devices then need only their part of each sum.",
    """\
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
split, result = (P("data"), P(None, "model"), P("model")), P("data")
with jax.set_mesh(mesh):
  placed = [jax.device_put(a, spec) for a, spec in zip(arrays(), split, strict=True)]
  layer = jax.jit(lambda *given: jax.lax.with_sharding_constraint(plain(*given), result))
  y = layer(*placed)
print("a device has", y.sharding.shard_shape(y.shape), "of", y.shape)""",
    ('P("model")), P("data")', 'P("model")), P("data", "model")'),
    "a device has (4, 16) of (16, 32)",
  ),
  "in_types": Try(
    "Add two arrays that are split differently. With sharding in types, JAX does not choose for you: it names both "
    "shardings and stops.",
    """\
with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"))):
  x, y = jax.device_put(jnp.ones((8, 8)), P("data")), jax.device_put(jnp.ones((8, 8)), P("data"))
  try:
    print(jax.typeof(x + y))
  except Exception as error:
    print(type(error).__name__)""",
    ('jnp.ones((8, 8)), P("data"))\n', 'jnp.ones((8, 8)), P(None, "data"))\n'),
    "Error",
  ),
  "by_hand": Try(
    "Leave the psum out, and return `partial`. The types notice that the devices along `model` would return different "
    "values.",
    """\
mesh = jax.make_mesh((4, 2), ("data", "model"))
split = P("data"), P(None, "model"), P("model")
placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays(), split, strict=True)]

def on_one_device(x, w1, w2):
  partial = jax.nn.relu(x @ w1) @ w2
  return jax.lax.psum(partial, "model")

try:
  y = jax.jit(jax.shard_map(on_one_device, mesh=mesh, in_specs=split, out_specs=P("data")))(*placed)
  print("equal to one device:", bool(jnp.allclose(y, plain(*arrays()), rtol=1e-4, atol=1e-4)))
except ValueError as error:
  print("ValueError: out_specs promise what is not so")""",
    ('jax.lax.psum(partial, "model")', "partial"),
    "ValueError",
  ),
  "where_they_differ": Try(
    "How many examples must there be until the compiler gathers the weights, as FSDP wants? Try 16, 32, 64 and 128.",
    """\
copies = 1  # of 16 examples
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
few, w1, w2 = arrays()
given = zip((jnp.tile(few, (copies, 1)), w1, w2), (P("data"), P("data"), P(None, "data")), strict=True)
with jax.set_mesh(mesh):
  y = jax.jit(plain)(*[jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in given])
print(f"{16 * copies} examples: each device has {y.sharding.shard_shape(y.shape)} of {y.shape}")""",
    ("copies = 1 ", "copies = 16 "),
    "256 examples: each device has (32, 32) of (256, 32)",
  ),
  "gradient_of_a_split_batch": Try(
    "Return the mean over a device's own examples and not the sum. The gradient is then too large by the number of "
    "devices: eight means are added up. This is why losses here travel as sums.",
    """\
mesh = jax.make_mesh((8,), ("data",))
x = jax.device_put(jax.random.normal(jax.random.key(0), (16, 4)), NamedSharding(mesh, P("data")))
w = jax.device_put(jnp.ones(4), NamedSharding(mesh, P()))
reduce = jnp.sum
loss = lambda w, x: reduce(jnp.tanh(x @ w))
split = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
whole = jax.grad(loss)(*jax.device_get((w, x)))
print(f"{jnp.mean(split(w, x) / whole):.1f} × the gradient on one device")""",
    ("reduce = jnp.sum", "reduce = jnp.mean"),
    "8.0 × the gradient on one device",
  ),
  "keys_go_round": Try(
    "Let eight devices share the text. The pieces are half as large, and there are more of them. How much more does "
    "each device send?",
    """\
devices = 4
mesh = jax.make_mesh((devices,), ("context",), devices=jax.devices()[:devices])
whole = jax.random.normal(jax.random.key(0), (3, 256, 16))
q, k, v = (jax.device_put(x, NamedSharding(mesh, P("context"))) for x in whole)
layer = jax.shard_map(on_the_ring, mesh=mesh, in_specs=P("context"), out_specs=P("context"))
sent = print_sent(jax.jit(layer).lower(q, k, v).compile(), mesh)
print(f"{devices} devices: each sends {sum(one.sent_in_step for one in sent):,.0f} bytes")""",
    ("devices = 4", "devices = 8"),
    "8 devices: each sends 28,672 bytes",
  ),
  "balanced": Try(
    "Let 16 devices share 4,096 positions. How many times as many scores does the last one need as the first?",
    """\
devices, positions = 4, 256
chunks = np.arange(1, positions + 1).reshape(devices, -1).sum(axis=1)
print(f"the last of {devices} devices needs {chunks[-1] / chunks[0]:.1f} times as many scores as the first")""",
    ("4, 256", "16, 4096"),
    "the last of 16 devices needs 30.9 times as many scores as the first",
  ),
  "halo": Try(
    "Let eight devices share the text. How much more does each device send?",
    """\
devices = 4
mesh = jax.make_mesh((devices,), ("context",), devices=jax.devices()[:devices])
whole = jax.random.normal(jax.random.key(0), (3, 256, 16))
q, k, v = (jax.device_put(x, NamedSharding(mesh, P("context"))) for x in whole)
layer = jax.shard_map(with_a_halo, mesh=mesh, in_specs=P("context"), out_specs=P("context"))
sent = print_sent(jax.jit(layer).lower(q, k, v).compile(), mesh)
print(f"{devices} devices: each sends {sum(one.sent_in_step for one in sent):,.0f} bytes")""",
    ("devices = 4", "devices = 8"),
    "8 devices: each sends 2,048 bytes",
  ),
  "a_router_chooses": Try(
    "Add the same number to all scores of the first expert. How many tokens does it get? Routers need a remedy against "
    "this: here it is a loss, `model.router_aux`.",
    """\
more = 0
x, router, *_ = tokens_and_experts()
chosen = jax.lax.top_k(x @ router + more * (jnp.arange(8) == 0), 2)[1]
print("tokens of each expert:", *np.bincount(chosen.ravel(), minlength=8))""",
    ("more = 0", "more = 5"),
    "tokens of each expert: 256 ",
  ),
  "tokens_go_to_experts": Try(
    "Leave room for half as many rows. The others are dropped, and the results of their tokens are wrong.",
    """\
room = 24
mesh = jax.make_mesh((4,), ("expert",), devices=jax.devices()[:4])
specs = P("expert"), P(), P("expert"), P("expert")
placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(tokens_and_experts(), specs, strict=True)]
layer = functools.partial(to_their_experts, room=room)
y = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P("expert")))(*placed)
differs = jnp.abs(y - mixture(*tokens_and_experts())).max(axis=1) > 1e-5
print(f"{jnp.sum(differs)} of {len(y)} tokens have another result")""",
    ("room = 24", "room = 12"),
    "105 of 256 tokens have another result",
  ),
  "tokens_go_to_all_devices": Try(
    "Let eight devices share the experts, so each has one, and half as many tokens. Does a device send less then?",
    """\
devices = 4
mesh = jax.make_mesh((devices,), ("expert",), devices=jax.devices()[:devices])
specs = P("expert"), P(), P("expert"), P("expert")
placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(tokens_and_experts(), specs, strict=True)]
layer = jax.jit(jax.shard_map(to_all_devices, mesh=mesh, in_specs=specs, out_specs=P("expert")))
sent = print_sent(layer.lower(*placed).compile(), mesh)
print(f"{devices} devices: each sends {sum(one.sent_in_step for one in sent):,.0f} bytes")""",
    ("devices = 4", "devices = 8"),
    "8 devices: each sends 28,672 bytes",
  ),
  "which_way_sends_less": Try(
    "Give each token eight experts. With how many devices do the all-to-alls send less then?",
    """\
chosen = 2  # experts of each token
for n in (2, 4, 8, 16, 64):
  to_all, to_experts = 2 * (n - 1), 1.25 * 2 * chosen * (n - 1) / n
  print(f"{n} devices: the {'all-to-alls send' if to_experts < to_all else 'gather sends'} less")""",
    ("chosen = 2", "chosen = 8"),
    "8 devices: the gather sends less\n16 devices: the all-to-alls send less",
  ),
  "layouts": Try(
    "Place another dimension, or take another strategy's layout: `three_d` also splits the layers over its stages.",
    """\
layout = resolve(strategies.layout_of("fsdp"), devices=8)
sharding = NamedSharding(make_mesh(layout, jax.devices()), layout.spec(("layers", "embed", "mlp")))
print(picture(sharding, (4, 64, 128)))""",
    ('"fsdp"', '"three_d"'),
    "8 pieces of (2, 32, 64)",
  ),
  "replicated_and_sharded": Try(
    "Look at `zero1`: its weights are whole. Then look at its moments, with `.opt_state` in the place of `.params`.",
    """\
name = "fsdp"
layout = resolve(strategies.layout_of(name), 8)
program = settings.program(base.get_config("tiny", name), "cpu")
strategy = strategies.build(base.get_config("tiny", name), layout, program, make_mesh(layout, jax.devices()))
weights = jax.tree.leaves_with_path(strategy.abstract_state().params)
for path, weight in weights[:3]:
  held = weight.sharding.shard_shape(weight.shape)
  print(jax.tree_util.keystr(path, simple=True, separator="/"), held, "of", weight.shape)""",
    ('"fsdp"', '"zero1"'),
    "blocks/attention/key (4, 64, 8, 4) of (4, 64, 8, 4)",
  ),
  "memory_without_devices": Try(
    "How many devices does FSDP need until the state of this model takes less than 16 GB on each? Change the size.",
    """\
config = base.get_config("lm", "fsdp")
config.model.update(width=4096, depth=32, heads=32, kv_heads=32, mlp_width=11008, vocab_size=32768)
layout = strategies.layout_of("fsdp").on(data=4)
strategy = strategies.build(config, layout, settings.program(config, "tpu"), abstract_mesh(layout))
state = jax.tree.leaves(strategy.abstract_state())
held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in state)
print(f"on {dict(layout.mesh)}: {held / 1e9:.2f} GB on each device")""",
    ("data=4", "data=8"),
    "on {'data': 8}: 10.",
  ),
}
