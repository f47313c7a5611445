"""Recording a trace: which steps, in which files, and that trouble with it never ends a run."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import config, one_sentence
from jax.profiler import ProfileData
from ml_collections import ConfigDict

from lab.analysis import trace
from runtime.profiling import STEP, Profiler
from training.loop import StepPlan

_double = jax.jit(lambda x: 2 * x)


def run(workdir: Path, steps: range, start: int, count: int) -> tuple[list[str], list[str]]:
  """Runs these steps with a profiler. Returns what it said and what it warned of."""
  said, warned = [], []
  settings = ConfigDict({"start": start, "steps": count})
  with Profiler(workdir, settings, steps.start, said.append, warned.append) as profiler:
    for step in steps:
      with profiler.step(step):
        metrics = {"loss": _double(jnp.ones(8))}
      profiler.after(step, metrics)
  return said, warned


def recorded(workdir: Path) -> dict[str, tuple[int, ...]]:
  """The steps in each file of a recording."""
  files = (workdir / "profile/plugins/profile").glob("*/*.xplane.pb")
  return {f"{file.parent.name}/{file.name}": trace.read([file.read_bytes()], STEP).steps for file in files}


def test_the_steps_asked_for_are_recorded_and_no_others(tmp_path: Path):
  said, warned = run(tmp_path, range(6), start=2, count=3)
  assert recorded(tmp_path) == {"steps-2-4/process-0.xplane.pb": (2, 3, 4)}
  assert said == [f"profile   steps 2 to 4 recorded; read them: python -m tools.profile {tmp_path}"]
  assert not warned
  assert not list((tmp_path / "profile").glob(".*"))


def test_the_trace_holds_the_last_step_and_no_python_calls(tmp_path: Path):
  run(tmp_path, range(3), start=1, count=2)
  (file,) = tmp_path.rglob("*.xplane.pb")
  events = [e for p in ProfileData.from_file(str(file)).planes for line in p.lines for e in line.events]
  runs = [e for e in events if dict(e.stats).get("hlo_module") == "jit__lambda"]
  assert len(runs) == 2
  assert not [e for e in events if e.name.startswith("$")]  # how the tracer of Python marks a call


def test_nothing_is_recorded_by_default(tmp_path: Path):
  assert config().profile.steps == 0
  assert run(tmp_path, range(3), start=0, count=0) == ([], [])
  assert not list(tmp_path.iterdir())


def test_a_run_that_resumes_after_the_steps_says_so(tmp_path: Path):
  said, _ = run(tmp_path, range(5, 7), start=2, count=3)
  assert said == ["profile   not recorded: this run starts after step 4, the last one to record"]
  assert recorded(tmp_path) == {}


@pytest.mark.full
def test_a_run_that_resumes_among_the_steps_records_the_rest(tmp_path: Path):
  run(tmp_path, range(4, 7), start=2, count=3)
  assert recorded(tmp_path) == {"steps-4-4/process-0.xplane.pb": (4,)}


def test_a_run_that_ends_among_the_steps_keeps_what_it_recorded(tmp_path: Path):
  run(tmp_path, range(4), start=2, count=3)
  assert recorded(tmp_path) == {"steps-2-3/process-0.xplane.pb": (2, 3)}


@pytest.mark.full
def test_processes_on_one_machine_write_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  for process in range(2):
    monkeypatch.setattr(jax, "process_index", lambda process=process: process)
    run(tmp_path, range(2), start=0, count=1)
  assert sorted(recorded(tmp_path)) == [f"steps-0-0/process-{i}.xplane.pb" for i in range(2)]


def test_a_profile_that_cannot_be_written_is_reported_once(tmp_path: Path):
  (tmp_path / "profile").mkdir()
  (tmp_path / "profile/plugins").touch()
  said, (warning,) = run(tmp_path, range(6), start=2, count=2)
  assert "the profile cannot be written" in warning
  assert "training continues" in warning
  assert not said
  assert not list((tmp_path / "profile").glob(".*"))


def test_a_profile_that_cannot_start_is_reported_once(tmp_path: Path):
  with jax.profiler.trace(str(tmp_path / "other")):
    said, (warning,) = run(tmp_path, range(6), start=2, count=2)
  assert "the profile cannot be recorded" in warning
  assert not said


@pytest.mark.parametrize(
  "fields, parts",
  [
    ({"profile__steps": -1}, ["profile.steps=-1"]),
    ({"profile__start": -1}, ["profile.start=-1"]),
    ({"profile__start": 16, "profile__steps": 5}, ["profile.start=16", "last step, 20", "profile.start=15 or less"]),
    ({"profile__start": 0, "profile__steps": 21}, ["profile.steps=21", "last step, 20", "profile.steps=20 or less"]),
    ({"profile__start": 1, "profile__steps": 5, "stop_after": 5}, ["last step, 5", "profile.start=0"]),
  ],
)
def test_steps_that_the_run_does_not_make_are_refused(fields: dict, parts: list[str]):
  with one_sentence(*parts):
    StepPlan.of(config("fsdp", steps=20, **fields))


def test_the_last_steps_can_be_recorded():
  assert StepPlan.of(config("fsdp", steps=20, profile__start=15, profile__steps=5)).last == 20
