"""Records some steps of a run as a JAX trace.

A trace says what each device ran, and when. tools/profile.py reads it; docs/profile.md explains it.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import jax

from errors import first_line

FOLDER = "profile"  # in the workdir
SESSIONS = Path("plugins", "profile")  # in FOLDER, where xprof looks for recordings
STEP = "train"  # the name of a step's annotation in the trace


class Profiler:
  """Records the steps from `profile.start` on, `profile.steps` of them, in `WORKDIR/profile`.

  A step's number is the count of steps done before it. All processes record, each into a file of its own. A trace that
  cannot be written is reported once, and training goes on. Use it as a context, which ends a recording that a signal or
  an error cuts short.

  Args:
    settings: the config's section `profile`.
    first: the first step of this run.
    say: prints a line about the run.
    warn: prints a warning.
  """

  def __init__(self, workdir: Path, settings: Any, first: int, say: Callable[[str], None], warn: Callable[[str], None]):
    self.workdir, self.say, self.warn = workdir, say, warn
    self.first, self.end = max(settings.start, first), settings.start + settings.steps
    self.passed = settings.steps > 0 and first >= self.end
    self.recording, self.last = False, -1
    self.metrics: dict[str, jax.Array] = {}

  def __enter__(self) -> Self:
    if self.passed:
      self.say(f"profile   not recorded: this run starts after step {self.end - 1}, the last one to record")
    return self

  def __exit__(self, *_: object) -> None:
    self._finish()

  @contextlib.contextmanager
  def step(self, number: int) -> Iterator[None]:
    """Marks the dispatch of a step in the trace. Starts the recording before the first step to record."""
    if not self.first <= number < self.end:
      yield
      return
    if number == self.first:
      self._start()
    with jax.profiler.StepTraceAnnotation(STEP, step_num=number):
      yield

  def after(self, number: int, metrics: dict[str, jax.Array]) -> None:
    """Takes the metrics of a dispatched step. Ends the recording once the last step to record has run."""
    self.metrics, self.last = metrics, number
    if number == self.end - 1:
      self._finish()

  def _start(self) -> None:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's calls would be most of the trace
    jax.block_until_ready(self.metrics)  # of the step before, so that the trace begins with a whole step
    try:
      jax.profiler.start_trace(self._scratch, profiler_options=options)
      self.recording = True
    except Exception as error:  # of the profiler or the device's driver, which document none
      self.warn(f"the profile cannot be recorded ({first_line(error)}); training continues")

  def _finish(self) -> None:
    if not self.recording:
      return
    self.recording = False
    session = self.workdir / FOLDER / SESSIONS / f"steps-{self.first}-{self.last}"
    try:
      with contextlib.suppress(RuntimeError):  # a step that failed raises where its metrics are read
        jax.block_until_ready(self.metrics)
      jax.profiler.stop_trace()
      session.mkdir(parents=True, exist_ok=True)
      for file in self._scratch.rglob("*.*"):
        if file.is_file():  # jax names files by host, and two processes may run on one
          shutil.move(file, session / f"process-{jax.process_index()}.{file.name.partition('.')[2]}")
      self.say(
        f"profile   steps {self.first} to {self.last} recorded; read them: python -m tools.profile {self.workdir}"
      )
    except Exception as error:  # such as a full disk, for which jax has errors of its own
      self.warn(f"the profile cannot be written ({first_line(error)}); training continues")
    shutil.rmtree(self._scratch, ignore_errors=True)

  @property
  def _scratch(self) -> Path:
    return self.workdir / FOLDER / f".process-{jax.process_index()}"
