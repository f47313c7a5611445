"""The moves of a step: what is computed, sent and held, one thing after another."""

from lab.analysis.communication import Collective
from lab.analysis.compiled import CompiledStep
from lab.analysis.hlo import Shape, parse
from lab.analysis.moves import Move, moves
from lab.analysis.overlap import Overlap, Span

PROGRAM = """
ENTRY %main (state: f32[256]) -> f32[256] {
  %state = f32[256] parameter(0)
  %p = f32[256] negate(%state)
  %q = f32[512] concatenate(%p, %p)
  %g = f32[1024] all-gather(%q)
  %r = f32[256] slice(%g)
  ROOT %s = f32[256] add(%r, %p)
}
"""
GATHER = Collective("g", "all-gather", ("data",), 2, (Shape("f32", (512,)),), 3, "")
SPANS = (
  Span("kernel", 0.0, 1e-3, 1, "p", "jit(f)/jvp(attention)/neg"),
  Span("kernel", 1e-3, 2e-3, 1, "q", "jit(f)/jvp(mlp)/concatenate"),
  Span("loop", 2e-3, 11e-3, 3, "while.1", "jit(f)/jvp()/while", round=3e-3),
  Span("sent", 2e-3, 4e-3, 3, "g", collective=GATHER, loop="while.1"),
  Span("exposed", 2e-3, 3e-3, 3, "g", collective=GATHER, loop="while.1"),
  Span("kernel", 3e-3, 5e-3, 3, "r", "jit(f)/optimizer/slice", loop="while.1"),
  Span("kernel", 11e-3, 11.001e-3, 1, "s"),  # too short to be shown
)


def test_kernels_between_messages_are_one_move():
  """And a message has its bytes, what it makes kernels wait, and what is in memory beside the state."""
  step = CompiledStep(parse(PROGRAM), 1_000, 9_000, 0.0, {"data": 2}, {})
  assert moves(step, Overlap((), 0.0, SPANS)) == [
    Move("", 1, "compute", ("attention", "mlp"), seconds=2e-3, memory=1024 + 2048),
    Move("forward", 3, "all-gather", ("f32[512]",), ("data",), 1, 2048.0, 2e-3, 1e-3, 1024 + 2048 + 4096),
    Move("forward", 3, "compute", ("optimizer",), seconds=2e-3, memory=1024 + 4096 + 1024),
  ]
