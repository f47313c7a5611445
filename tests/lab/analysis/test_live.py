"""Which arrays of a compiled program are in memory when, in programs that are small enough to count by hand."""

from lab.analysis.hlo import parse
from lab.analysis.live import live

# A loop that writes a part of a stack in each round. An array of 256 floats is 1 kB.
LOOP = """
%update (p: f32[4,256], q: f32[256]) -> (f32[4,256], f32[256]) {
  %p = f32[4,256] parameter(0)
  %q = f32[256] parameter(1)
  %dus = f32[4,256] dynamic-update-slice(%p, %q)
  %neg = f32[256] negate(%q)
  ROOT %both = (f32[4,256], f32[256]) tuple(%dus, %neg)
}

%body (given: (f32[4,256], f32[256])) -> (f32[4,256], f32[256]) {
  %given = (f32[4,256], f32[256]) parameter(0)
  %stack = f32[4,256] get-tuple-element(%given), index=0
  %x = f32[256] get-tuple-element(%given), index=1
  %start = (f32[256], f32[2,256]) all-gather-start(%x)
  %gathered = f32[2,256] all-gather-done(%start)
  %on_chip = f32[256]{0:S(1)} add(%x, %x)
  %product = f32[256] multiply(%gathered, %on_chip)
  %fused = (f32[4,256], f32[256]) fusion(%stack, %product), kind=kLoop, calls=%update
  %new_stack = f32[4,256] get-tuple-element(%fused), index=0
  %new_x = f32[256] get-tuple-element(%fused), index=1
  ROOT %out = (f32[4,256], f32[256]) tuple(%new_stack, %new_x)
}

%condition (c: (f32[4,256], f32[256])) -> pred[] {
  %c = (f32[4,256], f32[256]) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (state: f32[4,256]) -> f32[4,256] {
  %state = f32[4,256] parameter(0)
  %zeros = f32[4,256] broadcast(%state)
  %first = f32[256] slice(%state)
  %init = (f32[4,256], f32[256]) tuple(%zeros, %first)
  %loop = (f32[4,256], f32[256]) while(%init), condition=%condition, body=%body
  %saved = f32[4,256] get-tuple-element(%loop), index=0
  %after = f32[256] negate(%saved)
  ROOT %new_state = f32[4,256] add(%state, %after)
}
"""


def test_an_array_is_needed_from_its_maker_to_its_last_reader():
  found = live(parse(LOOP))
  assert {name: found[name] // 1024 for name in ("state", "zeros", "first", "loop", "saved", "after", "new_state")} == {
    "state": 4, "zeros": 8, "first": 9, "loop": 9, "saved": 9, "after": 10, "new_state": 9,
  }  # fmt: skip  # the last instruction reads the state, and no longer what was saved


def test_in_a_loop_what_is_around_it_is_counted_too():
  """What is gathered is freed after the product. The kernel updates the stack in place, and so it does the product."""
  found = live(parse(LOOP))
  assert {name: found[name] // 1024 for name in ("start", "gathered", "on_chip", "product", "fused", "out")} == {
    "start": 9 + 2, "gathered": 9 + 2, "on_chip": 9 + 2, "product": 9 + 3, "fused": 9 + 1, "out": 9 + 1,
  }  # fmt: skip
  assert found["neg"] == found["fused"]  # within a kernel
