"""What a step must send, calculated by hand for a small model. Nothing is compiled: test_communication.py does that."""

from typing import Any

import pytest
from helpers import program

import strategies
from lab.analysis import theory
from lab.analysis.case import Case
from models.sizes import ModelSizes
from strategies.execution.stages import orders
from strategies.execution.stages.schedule import Schedule

BATCH, LENGTH, WIDTH = 12, 16, 32
# Numbers in a model of 4 blocks: queries and an output of 32 × 32, keys and values of 32 × 16, an MLP of 32 × 48.
BLOCKS = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
TABLE = HEAD = 64 * 32
SCALES, LAST = 4 * 2 * 32, 32  # of the blocks' norms, and of the last norm
MATRICES, REST = BLOCKS + TABLE + HEAD, SCALES + LAST
F32, BF16 = 4, 2  # bytes
STREAM = LENGTH * WIDTH * F32  # bytes of the residual stream of an example

Row = tuple[str, tuple[str, ...], float, float]  # kind, axes, bytes, and those that nothing can hide


def sizes(**fields: Any) -> ModelSizes:
  given = {"width": WIDTH, "depth": 4, "heads": 8, "kv_heads": 4, "mlp_width": 48, "seq_len": LENGTH, "vocab_size": 64}
  return program(**{f"model__{name}": size for name, size in (given | fields).items()}).sizes


def sent(name: str, mesh: dict[str, int], model: ModelSizes, **fields: Any) -> list[Row]:
  """What is sent of weights and gradients, and between stages."""
  rows = theory.sent(Case(strategies.layout_of(name).on(**mesh), model, BATCH, **fields))
  of_stream = ("attention", "activations: ", "embedding and head", "loss")
  return sorted((row.kind, row.axes, row.bytes, row.edges) for row in rows if not row.what.startswith(of_stream))


def one_way(n: int, size: float) -> float:
  """Of an all-gather or a reduce-scatter over n devices; an all-reduce is one of each."""
  return size * (n - 1) / n


def table(*rows: Row) -> list[Row]:
  return [(kind, axes, pytest.approx(size), pytest.approx(edges)) for kind, axes, size, edges in sorted(rows)]


DATA = ("data",)
ALL = 2 * one_way(8, F32 * (MATRICES + REST))
SCATTER = one_way(8, F32 * MATRICES), one_way(8, F32 * (TABLE + HEAD))
SCALE = ("all-reduce", DATA, 2 * one_way(8, F32 * REST), 0)


@pytest.mark.parametrize(
  "name, fields, rows",
  [
    # With one part the compiler reduces: the lookup's table apart, as rows are added to it.
    ("data_parallel", {}, [
      ("all-reduce", DATA, 2 * one_way(8, F32 * (BLOCKS + HEAD)), 2 * one_way(8, F32 * HEAD)),
      ("all-reduce", DATA, 2 * one_way(8, F32 * TABLE), 2 * one_way(8, F32 * TABLE)), SCALE,
    ]),
    ("data_parallel", {"compiler": "gpu"}, [
      ("all-reduce", DATA, 2 * one_way(8, F32 * MATRICES), 2 * one_way(8, F32 * (TABLE + HEAD))), SCALE,
    ]),
    # With several parts all gradients are summed by hand, once, after the blocks.
    ("data_parallel", {"accumulation": 4}, [("all-reduce", DATA, ALL, ALL)]),
    ("zero1", {}, [
      ("all-gather", DATA, SCATTER[0], SCATTER[0]), ("reduce-scatter", DATA, *SCATTER), SCALE,
    ]),
    ("zero1", {"accumulation": 2}, [
      ("all-gather", DATA, SCATTER[0], SCATTER[0]), ("reduce-scatter", DATA, SCATTER[0], SCATTER[0]),
      ("all-reduce", DATA, SCALE[2], SCALE[2]),
    ]),
    ("zero2", {"accumulation": 2}, [
      ("all-gather", DATA, SCATTER[0], SCATTER[0]), ("reduce-scatter", DATA, *(2 * x for x in SCATTER)),
      ("all-reduce", DATA, 2 * SCALE[2], 0),
    ]),
    # Blocks are gathered forward and backward, for each part.
    ("fsdp", {}, [
      ("all-gather", DATA, SCATTER[1] + 2 * one_way(8, F32 * BLOCKS), SCATTER[1]),
      ("reduce-scatter", DATA, *SCATTER), SCALE,
    ]),
    ("fsdp", {"accumulation": 4}, [
      ("all-gather", DATA, SCATTER[1] + 8 * one_way(8, F32 * BLOCKS), SCATTER[1]),
      ("reduce-scatter", DATA, *(4 * x for x in SCATTER)), ("all-reduce", DATA, 4 * SCALE[2], 0),
    ]),
    ("fsdp", {"accumulation": 4, "gather": "step"}, [
      ("all-gather", DATA, SCATTER[0], SCATTER[0]), ("reduce-scatter", DATA, SCATTER[0], SCATTER[0]),
      ("all-reduce", DATA, SCALE[2], SCALE[2]),
    ]),
    # The CPU's compiler all-reduces and slices.
    ("fsdp", {"compiler": "cpu"}, [
      ("all-gather", DATA, SCATTER[0] + one_way(8, F32 * BLOCKS), SCATTER[1]),
      ("all-reduce", DATA, 2 * one_way(8, F32 * (BLOCKS + HEAD)), SCATTER[1]),
      ("all-reduce", DATA, SCATTER[1], SCATTER[1]), SCALE,
    ]),
  ],
)  # fmt: skip
def test_eight_devices_send_what_the_papers_say(name: str, fields: dict[str, Any], rows: list[Row]):
  assert sent(name, {"data": 8}, sizes(), **fields) == table(*rows)


def test_replicas_all_reduce_the_pieces():
  """HSDP, 2 × 4 devices. With two parts, the reduction over the replicas waits, and the program scatters by hand."""
  gathered, outside = 2 * 2 * one_way(4, F32 * BLOCKS), one_way(4, F32 * (TABLE + HEAD))
  pieces = 2 * one_way(2, F32 * MATRICES / 4)
  mesh, both = {"replica": 2, "data": 4}, ("replica", "data")
  assert sent("hsdp", mesh, sizes(), accumulation=2) == table(
    ("all-gather", DATA, gathered + 2 * outside, 2 * outside),  # outside the blocks for each part, as by hand
    ("reduce-scatter", DATA, 2 * one_way(4, F32 * MATRICES), 2 * outside),
    ("all-reduce", ("replica",), pieces, pieces),
    ("all-reduce", both, 2 * one_way(8, F32 * REST), 2 * one_way(8, F32 * REST)),
  )
  found = sent("hsdp", mesh, sizes())
  of_pieces = sum(size for kind, axes, size, _ in found if (kind, axes) == ("all-reduce", ("replica",)))
  whole = 2 * one_way(2, F32 * (BLOCKS + HEAD) / 4)
  assert of_pieces == pytest.approx(whole)  # the table's gradient is all-reduced over both


def test_gathers_and_gradients_have_the_compute_dtype_and_new_weights_their_own():
  model = sizes(dtype="bfloat16")
  scatter = one_way(8, BF16 * MATRICES), one_way(8, BF16 * (TABLE + HEAD))
  assert sent("fsdp", {"data": 8}, model) == table(
    ("all-gather", DATA, scatter[0] + one_way(8, BF16 * BLOCKS), scatter[1]), ("reduce-scatter", DATA, *scatter), SCALE
  )
  assert sent("zero1", {"data": 8}, model) == table(
    ("all-gather", DATA, SCATTER[0], SCATTER[0]), ("reduce-scatter", DATA, *scatter), SCALE
  )


def test_devices_that_split_positions_sum_what_they_computed_of_their_own():
  assert sent("context", {"context": 4}, sizes()) == table(
    ("all-reduce", ("context",), *[2 * one_way(4, F32 * (MATRICES + REST))] * 2)
  )
  assert sent("tensor_parallel", {"model": 4}, sizes()) == table(
    ("all-reduce", ("model",), 2 * one_way(4, F32 * REST), 0)
  )
  scales = 2 * one_way(8, F32 * REST)  # over batch and positions, together
  found = sent("two_d", {"data": 4, "model": 2}, sizes())
  assert ("all-reduce", ("data", "model"), pytest.approx(scales), 0) in found
  found = sent("two_d", {"data": 4, "model": 2}, sizes(), compiler="cpu")  # one after the other
  assert ("all-reduce", DATA, pytest.approx(2 * one_way(4, F32 * REST)), 0) in found
  assert ("all-reduce", ("model",), pytest.approx(2 * one_way(2, F32 * REST)), 0) in found


def built(name: str, microbatches: int, chunks: int = 1) -> Schedule:
  return orders.build(orders.ORDERS[name], 2, microbatches, chunks)


def test_stages_share_what_is_outside_their_blocks_and_pass_the_stream_on():
  """Two stages and three microbatches: each direction takes 4 ticks, one of them without units of the other."""
  own, outside = 2 * one_way(2, F32 * (BLOCKS + SCALES) / 2), 2 * one_way(4, F32 * (TABLE + HEAD + LAST))
  stream = BATCH / 3 / 2 * STREAM
  assert sent("pipeline", {"stage": 2, "data": 2}, sizes(), schedule=built("1f1b", 3)) == table(
    ("all-reduce", DATA, own, own),
    ("all-reduce", ("stage", "data"), outside, outside),
    ("collective-permute", ("stage",), 8 * stream, 2 * stream),
  )


def test_stages_of_several_chunks_send_their_weights():
  """Two stages, microbatches and chunks: each direction takes 5 ticks, 3 of them without units of the other."""
  outside, stream = 2 * one_way(2, F32 * (TABLE + HEAD + LAST)), BATCH / 2 * STREAM
  chunks = 2 * F32 * (BLOCKS + SCALES) / 2  # weights, and gradients back
  mesh = {"stage": 2, "data": 1}
  assert sent("pipeline", mesh, sizes(), schedule=built("interleaved", 2, 2)) == table(
    ("all-reduce", ("stage",), outside, outside),
    ("collective-permute", ("stage",), 10 * stream, 6 * stream),
    ("collective-permute", ("stage",), chunks, chunks),
  )


def test_stages_of_fsdp_gather_once_a_step_and_exchange_for_each_part():
  gather = one_way(2, F32 * (BLOCKS / 2 + TABLE + HEAD))
  outside, stream = 2 * one_way(2, F32 * (TABLE + HEAD) / 2), BATCH / 3 / 2 / 2 * STREAM
  scales, last = 2 * one_way(2, F32 * SCALES / 2), 2 * one_way(4, F32 * LAST)
  mesh = {"stage": 2, "data": 2, "model": 1}
  assert sent("three_d", mesh, sizes(), schedule=built("1f1b", 3), accumulation=2) == table(
    ("all-gather", DATA, gather, gather),
    ("reduce-scatter", DATA, gather, gather),
    ("all-reduce", ("stage",), outside, outside),
    ("all-reduce", DATA, scales, scales),
    ("all-reduce", ("stage", "data"), last, last),
    ("collective-permute", ("stage",), 2 * 8 * stream, 2 * 2 * stream),
  )


def test_rows_say_what_for_and_what_the_next_computation_waits_for():
  words = lambda name, **fields: {
    row.what: row.waits for row in theory.sent(Case(strategies.layout_of(name).on(data=8), sizes(**fields), BATCH))
  }
  assert words("fsdp", qkv_bias=True) == {
    "weights, for the forward and for the backward pass": False,
    "gradients, to the weight shards": False,
    "gradients of the norms' scales and of biases": False,
  }
  assert words("zero1") == {
    "new weights, from the pieces that devices update": True,
    "gradients, to pieces": False,
    "gradients of the norms' scales": False,
  }
  assert theory.sent(Case(strategies.layout_of("single"), sizes(), BATCH)) == []
