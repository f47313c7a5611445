"""The pages that are made by running code, and their lessons. `python -m tools.tour` runs them.

A lesson is a module. The first line of its docstring has its title and its subject. Its `STEPS` are functions. A
step takes no arguments, prints what it shows, and returns data for the tests. The page links to the code of those in
`IN_FILE` and shows only what they print. Its docstring has a title and the text before
the code. Its body is shown on the page, so write it for readers. Other definitions of the module that a step uses are
shown once, before it. What it prints must be the same with every supported version of JAX. To add a step, write it, add
it to `STEPS`, and test what it teaches in tests/tools (`test_tour.py` and the files beside it).
"""

import dataclasses
from collections.abc import Mapping
from types import ModuleType

from lab.lessons import (
  causes,
  devices_and_meshes,
  experts,
  four_ways,
  gathers,
  looking,
  memory,
  migrating,
  modes,
  moves,
  placing,
  pmap_here,
  recompiling,
  ring,
  rounding,
  state,
  three_ways,
  train_step,
  waiting,
)
from lab.lessons.trying import AFTER, Try


@dataclasses.dataclass(frozen=True)
class Page:
  """A page of docs/. `conclusion` has the last words, in the terminal and on the page.

  Attributes:
    tries: what to try after a step, by the step's name. A page with these is also written as a notebook.
    in_parts: whether each lesson has a file of its own, and the page only their contents.
  """

  title: str
  introduction: str
  lessons: tuple[ModuleType, ...]
  conclusion: str
  tries: Mapping[str, Try] = dataclasses.field(default_factory=dict)
  in_parts: bool = False


TOUR = Page(
  "Sharding, by running it",
  """\
This tour shows how JAX spreads an array, a layer and a training step over many devices. It starts with a mesh and ends
with the memory of a large model. Each step is a short function, followed by what it printed. Running the steps wrote
this page, and tests check what it claims:

```
python -m tools.tour
```

You need no accelerator, because the CPU simulates eight devices. To experiment, open the same tour as a notebook
([tour.ipynb](tour.ipynb)): it has a cell to change after each step. Or change a step in `lab/lessons` and run it
alone, by the name of its function: `python -m tools.tour --steps=specs`.""",
  (devices_and_meshes, placing, four_ways, train_step, ring, experts, memory),
  """\
You have now seen everything that the strategies are made of. Next, read `strategies/layout.py` and
`strategies/fsdp.py`. Then train with one: `python train.py --config=configs/fsdp.py:tiny`.""",
  AFTER,
  in_parts=True,
)

PMAP = Page(
  "From pmap to jit",
  """\
`jax.pmap` was JAX's first way to use several devices. Since jax 0.8 it is a `jax.jit` of a `jax.shard_map` over a mesh
of one axis. What pmap adds:

- It takes the leading dimension of each argument off inside the function, and puts it on again outside.
- It makes the mesh itself, from the first devices, as many as the leading dimension has entries.
- With several processes, it turns each one's own arrays into global ones before the call, and back after it.
- It does not check that the devices agree on a result which should be the same on all of them (`check_vma=False`).

So new code has no reason to use it. This page shows the same training step in all three, then what changes when you
migrate, and how this repository does it. JAX has [notes](https://docs.jax.dev/en/latest/migrate_pmap.html), too. Each
step below is a function in `lab/lessons`, followed by what it printed on eight simulated devices:

```
python -m tools.tour pmap
python -m tools.tour pmap --steps=nested        # a step alone, by the name of its function
```""",
  (three_ways, migrating, pmap_here),
  """\
In short: place the arrays with `device_put` and a `NamedSharding`, drop the leading dimension, take the mean over the
global batch, and delete the psums. Keep a shard_map where you want to write the communication yourself. Next:
[the tour](tour.md), for what a sharding is, and [debugging](debugging.md), for when the compiler sends too much.""",
)

DEBUGGING = Page(
  "Debugging",
  """\
A wrong sharding rarely fails. The numbers are right, and the program sends too much or computes everything twice. This
page shows how to see where an array is and what a program sends, how to find the line that is to blame, and how to fix
it; then what compiles again, what waits, and which differences are normal. It needs no accelerator. The compiler's
choices below are those for CPUs, but the causes are the same elsewhere.

| Question | What answers it |
|---|---|
| Where is this array? | `x.sharding`, `jax.debug.visualize_array_sharding(x)`, `lab.views.pictures.picture` |
| And inside jit? | `jax.debug.inspect_array_sharding`; with `Explicit` mesh axes also `jax.typeof` |
| What does my program send? | `.lower(...).compile().as_text()`, read by `print_sent` and `print_origins` |
| And one of my own? | `python -m tools.explain --program=my.module:step` ([below](#the-warning-and-its-line)) |
| What does a step of this repository send? | `python -m tools.explain --config=...` ([explain](explain.md)) |

Each step below is a function in `lab/lessons`, followed by what it printed on eight simulated devices. Running the
steps wrote this page, and tests check what it claims:

```
python -m tools.tour debugging
python -m tools.tour debugging --steps=fixed    # a step alone, by the name of its function
```""",
  (looking, gathers, causes, moves, modes, state, recompiling, waiting, rounding),
  """\
If you add a strategy or change the model, run `python -m tests.golden.make_explain` and look at the diff. It shows
every collective that came or went. Next: [what each strategy sends](strategies.md), and [the tour](tour.md).""",
)

PAGES = {"tour": TOUR, "pmap": PMAP, "debugging": DEBUGGING}  # by the name of the file
