"""Saves in the hosts' memory survive lost processes, on any number of them, and nothing wrong is restored.

Processes are threads here, and arrays are NumPy's, with shardings that only say who holds what. The bytes really go
over sockets and into files. tests/job/test_healing.py does it with real jobs.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import json
import os
import queue
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from helpers import config, initial_state, one_sentence, program, random_batch, strategy

from checkpointing import record, restore
from checkpointing.memory import exchange, pieces, recovery, store
from checkpointing.memory import tier as saving
from checkpointing.memory.exchange import Peer, Server
from checkpointing.memory.store import Damaged, Entry, Portion, Save, Store
from checkpointing.memory.tier import Tier
from checkpointing.save import NotSaved
from errors import JobConfigError, JobError
from lab.analysis import memory as predicted
from lab.analysis.case import Case
from runtime import processes
from runtime.replicas import Corrupted
from strategies import names
from training.loop import MEMORY_SAVES, LoopState, StepPlan
from training.program import TrainState

RUN = {
  "config": {"model": {"width": 64}},
  "data": {
    "fingerprints": [], "turns": [], "tokenizer": "", "seed": 0, "batch_size": 16, "first": 0, "given": [],
    "streams": [], "left": {},
  },
  "strategy": "fsdp", "devices": 4, "processes": 4, "context": 8,
}  # fmt: skip
VALUES = {
  "params/weights": np.random.default_rng(0).standard_normal((24, 5)).astype(np.float32),
  "params/scale": np.arange(9).astype(jax.numpy.bfloat16),
  "step": np.array(7, np.int32),
}
me = threading.local()  # the number of this thread's process


class Split:
  """The sharding of an array over the devices of some processes, one each: by rows, or all of it on each."""

  def __init__(self, processes: int, split: bool):
    self.processes, self.split = processes, split

  def devices_indices_map(self, shape: tuple[int, ...]) -> dict[Any, tuple[slice, ...]]:
    rest = tuple(slice(None) for _ in shape[1:])
    rows = shape[0] // self.processes if self.split else 0
    portion = lambda i: (slice(i * rows, (i + 1) * rows), *rest) if self.split else tuple(slice(None) for _ in shape)
    return {Device(i): portion(i) for i in range(self.processes)}

  def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict[Any, tuple[slice, ...]]:
    return {d: index for d, index in self.devices_indices_map(shape).items() if d.process_index == me.rank}


class Device:
  def __init__(self, process_index: int):
    self.process_index = process_index


class Data:
  """What a device holds. It changes as soon as the state may be donated."""

  def __init__(self, values: np.ndarray):
    self.values = values

  def copy_to_host_async(self) -> None:
    pass

  def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
    return np.asarray(self.values)


class Array:
  """A global array, of which this process sees its own shards."""

  def __init__(self, values: np.ndarray, sharding: Split):
    self.values, self.sharding, self.shape, self.dtype = values, sharding, values.shape, values.dtype

  @property
  def addressable_shards(self) -> list[Any]:
    return [
      SimpleNamespace(index=index, data=Data(self.values[index]))
      for index in self.sharding.addressable_devices_indices_map(self.shape).values()
    ]


class Job:
  """Processes of a job, as threads."""

  def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
    self.folder, self.workdir, self.warnings = folder, folder / "run", list[str]()
    self.given, self.host = str(folder / "memory"), "host{}"
    self.workdir.mkdir()
    monkeypatch.setattr(processes, "all_gather", self._all_gather)
    monkeypatch.setattr(jax, "process_index", lambda: me.rank)
    monkeypatch.setattr(jax, "process_count", lambda: self.count)
    monkeypatch.setattr(jax, "make_array_from_callback", lambda shape, sharding, shard: [
      shard(index) for index in sharding.addressable_devices_indices_map(shape).values()
    ])  # fmt: skip
    arrays = lambda tree, own=None: {name: [list(x.shape), str(x.dtype), "0"] for name, x in record.named(tree)}
    monkeypatch.setattr(record, "arrays", arrays)
    monkeypatch.setattr(record, "damaged", lambda *_: None)

  def _all_gather(self, value: Any) -> list[Any]:
    self.values[me.rank] = json.loads(json.dumps(value))
    self.barrier.wait()
    found = list(self.values)
    self.barrier.wait()
    return found

  def run(self, count: int, work: Callable[[Tier], Any]) -> list[Any]:
    """Runs `work` in so many processes, each on a host of its own, and returns what each has returned."""
    self.count, self.values, self.barrier = count, [None] * count, threading.Barrier(count, timeout=30)

    def process(rank: int) -> Any:
      me.rank = rank
      try:
        fields = {"memory_every": 5, "memory_dir": self.given}
        asked = config(**{f"checkpoint__{name}": value for name, value in fields.items()})
        asked.distributed.update(host=self.host.format(rank), coordinator="127.0.0.1:1")
        tier = Tier(asked, self.workdir, self.warnings.append)
        out = work(tier)
        self._all_gather(None)  # others may still send copies to this one
        tier.server.close()
        return out
      except BaseException:
        self.barrier.abort()
        raise

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
      tasks = [pool.submit(process, rank) for rank in range(count)]
    errors = [task.exception() for task in tasks if task.exception()]
    for error in errors:
      if not isinstance(error, threading.BrokenBarrierError):
        raise error
    return [task.result() for task in tasks]

  def state(self, add: int = 0) -> dict[str, Any]:
    """The state, in the layout of this number of processes. Weights are split by rows, the rest is everywhere."""
    arrays = {
      name: Array((values + add).astype(values.dtype), Split(self.count, name == "params/weights"))
      for name, values in VALUES.items()
    }
    return record.nested(arrays.items())

  def save(self, tier: Tier, step: int, wait: bool = True) -> None:
    tier.save(self.state(step), RUN, LoopState(step, False))
    if wait:
      tier.wait()

  def start(self, tier: Tier, *steps: int) -> None:
    """Restores nothing, and saves after these steps."""
    assert recovery.restore(tier, self.state(), RUN, -1, pytest.fail) is None
    tier.keep_only(None)
    for step in steps:
      self.save(tier, step)

  def restored(self, count: int, newer_than: int = -1) -> int | None:
    """The step from which so many processes go on. All of their shards are compared with what was saved."""

    def work(tier: Tier) -> int | None:
      found = recovery.restore(tier, self.state(), RUN, newer_than, self.warnings.append)
      tier.keep_only(tier.complete)
      processes.all_gather(None)
      if not found:
        assert tier.store.portions() == []
        return None
      state, saved = found
      step = saved["loop"]["step"]
      for (name, wanted), (_, shards) in zip(
        record.named(self.state(step)), sorted(_leaves(state).items()), strict=True
      ):
        for shard, found_shard in zip(wanted.addressable_shards, shards, strict=True):
          np.testing.assert_array_equal(np.asarray(shard.data), found_shard, err_msg=name)
          assert found_shard.dtype == wanted.dtype
      assert {portion.of.step for portion in tier.store.portions()} <= {step}
      return step

    steps = set(self.run(count, work))
    assert len(steps) == 1, "processes disagree"
    return steps.pop()

  def files(self, step: int, owner: int) -> list[Path]:
    """The owner's file of a save, and its neighbour's copy."""
    found = (self.folder / "memory").glob(f"*/*/*/{step}-*-{owner}-of-*")
    return sorted(found, key=lambda path: path.parent.name != str(owner))

  def lose(self, *hosts: int) -> None:
    for host in hosts:
      for folder in (self.folder / "memory").glob(f"*/host{host}"):
        shutil.rmtree(folder)


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
  if not isinstance(tree, dict):
    return {prefix: tree}
  return {name: x for key, inner in tree.items() for name, x in _leaves(inner, f"{prefix}/{key}".strip("/")).items()}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
  return Job(tmp_path, monkeypatch)


@pytest.mark.parametrize("count", [4, 3, 2, 1])
def test_a_lost_host_is_restored_from_its_neighbour_on_any_number_of_processes(count: int, job: Job):
  """Saved by four. Where fewer go on, their hosts are the first ones, so parts come from a host's neighbour."""
  job.run(4, lambda tier: job.start(tier, 5, 10))
  job.lose(1)
  if count < 4:  # the other hosts are there, too, but no process of this job runs on them
    for host in range(count, 4):
      for folder in (job.folder / "memory").glob(f"*/host{host}"):
        for path in folder.glob("*/*"):
          target = folder.with_name("host0") / path.parent.name
          target.mkdir(exist_ok=True)
          path.rename(target / path.name)
  assert job.restored(count) == 10
  assert job.warnings == []


def test_what_storage_has_is_not_restored_from_memory(job: Job):
  job.run(4, lambda tier: job.start(tier, 5, 10))
  assert job.restored(4, newer_than=10) is None
  assert job.warnings == []


@pytest.mark.parametrize("stored, whole, step", [([200, 300], 200, 295), ([300], 0, 295), ([200, 300], 300, 300)])
def test_a_damaged_checkpoint_is_replaced_by_the_newest_state_wherever_it_is(
  stored: list[int], whole: int, step: int, job: Job, monkeypatch: pytest.MonkeyPatch
):
  """Storage has checkpoints, of which one is whole, or none. Memory has step 295."""
  job.run(4, lambda tier: job.start(tier, 290, 295))
  folder = job.workdir / "checkpoints"
  of_state = {name: [list(x.shape), str(x.dtype), "0"] for name, x in VALUES.items()}
  for one in stored:
    (folder / str(one) / "run").mkdir(parents=True)
    saved = RUN | {"loop": dataclasses.asdict(LoopState(one, False)), "arrays": of_state}
    (folder / str(one) / "run" / "metadata").write_text(json.dumps(saved))
  read = lambda place, abstract, _: (abstract, "") if int(place.name) == whole else (None, "the weights are torn")
  monkeypatch.setattr(restore, "read_tree", read)
  monkeypatch.setattr(restore.record, "jump", lambda *_: [])  # RUN has no learning rate
  as_it_is = SimpleNamespace(of_base=lambda _: {}, changing=lambda params: params, optimizer=None)

  def begin(tier: Tier) -> tuple[int, str, set[int]]:
    abstract = TrainState(**job.state(), opt_state={})
    runner = SimpleNamespace(program=as_it_is, abstract_state=lambda: abstract)
    start = restore.begin(job.workdir, "", runner, RUN, job.warnings.append, tier)
    return start.loop.step, start.source, {portion.of.step for portion in tier.store.portions()}

  in_memory = step == 295
  assert job.run(4, begin) == [(step, "memory", {295}) if in_memory else (step, "checkpoint", set())] * 4
  assert [file.name for file in folder.glob("damaged-*")] == (["damaged-300-1"] if in_memory else [])
  assert all("resuming from step 295 in the hosts' memory" in line for line in job.warnings)


def test_memory_stays_if_storage_cannot_be_read(job: Job, monkeypatch: pytest.MonkeyPatch):
  job.run(2, lambda tier: job.start(tier, 5))
  (job.workdir / "checkpoints" / "10").mkdir(parents=True)
  monkeypatch.setattr(restore, "restore", lambda *_: (_ for _ in ()).throw(JobConfigError("storage does not answer")))
  runner = SimpleNamespace(
    program=SimpleNamespace(of_base=lambda _: {}, changing=dict), abstract_state=lambda: TrainState({}, {}, {})
  )
  with pytest.raises(JobConfigError):
    job.run(2, lambda tier: restore.begin(job.workdir, "", runner, RUN, pytest.fail, tier))
  assert len(job.files(5, 0)) == 2


def test_two_neighbours_lost_at_once_need_storage_and_others_do_not(job: Job, tmp_path: Path):
  job.run(4, lambda tier: job.start(tier, 5, 10))
  shutil.copytree(tmp_path / "memory", tmp_path / "kept")
  job.lose(0, 2)
  assert job.restored(4) == 10
  shutil.rmtree(tmp_path / "memory")
  (tmp_path / "kept").rename(tmp_path / "memory")
  job.lose(1, 2)
  assert job.restored(4) is None
  (line,) = job.warnings
  assert "cannot be used (step 10 lacks what process 1 had); going on from storage" in line


def test_one_flipped_bit_is_read_from_the_copy_and_two_from_the_save_before(job: Job):
  def flip(path: Path) -> None:
    with path.open("r+b") as file:
      file.seek(3)
      byte = file.read(1)[0]
      file.seek(3)
      file.write(bytes([byte ^ 16]))

  job.run(4, lambda tier: job.start(tier, 5, 10))
  own, copy = job.files(10, 2)
  flip(own)
  assert job.restored(4) == 10
  assert job.warnings == []
  flip(copy)
  assert job.restored(4) is None  # restoring has removed the save of step 5
  job.warnings.clear()
  job.run(4, lambda tier: job.start(tier, 5, 10))
  for path in job.files(10, 2):
    flip(path)
  assert job.restored(4) == 5
  (line,) = job.warnings
  assert "(step 10: the portion of process 2: params/weights is not what was saved); going on from step 5 there" in line


def test_a_torn_file_is_read_from_the_copy(job: Job):
  job.run(4, lambda tier: job.start(tier, 5))
  own, copy = job.files(5, 3)
  os.truncate(own, own.stat().st_size - 1)
  assert job.restored(4) == 5
  os.truncate(copy, 40)
  assert job.restored(4) is None
  assert "step 5: the portion of process 3: it is torn" in job.warnings[-1]


@pytest.mark.parametrize(
  "moment, host_lost, found",
  [("writes", False, 5), ("writes", True, 5), ("sends", False, 10), ("sends", True, 5), ("receives", True, 10)],
)
def test_a_kill_during_a_save_leaves_the_one_before_whole(
  moment: str, host_lost: bool, found: int, job: Job, monkeypatch: pytest.MonkeyPatch
):
  """Process 2 is killed while it writes step 10, sends its part, or receives the copy of process 1's part.

  Step 5 stays on all hosts with all copies. The job goes on from step 10 if that is whole somewhere.
  """
  finish, send, keep = Tier._finish, Peer.keep, Server._keep

  def finishes(self: Tier, file: Any, portion: Portion, saved: Any) -> None:
    if (moment, portion.of.step, portion.owner) != ("writes", 10, 2):
      finish(self, file, portion, saved)

  def sends(self: Peer, portion: Portion, file: Path) -> None:
    if (moment, portion.of.step, portion.owner) != ("sends", 10, 2):
      return send(self, portion, file)
    self._ask(do="keep", portion=portion.file, bytes=file.stat().st_size)
    return self._connection.send_bytes(file.read_bytes()[:100])

  def keeps(self: Server, connection: Any, portion: Portion, size: int) -> None:
    if (moment, portion.of.step, portion.owner) == ("receives", 10, 1):
      self.store.create(portion, size).write(0, b"torn")
      raise ConnectionResetError
    keep(self, connection, portion, size)

  monkeypatch.setattr(Tier, "_finish", finishes)
  monkeypatch.setattr(Peer, "keep", sends)
  monkeypatch.setattr(Server, "_keep", keeps)
  job.run(4, lambda tier: job.start(tier, 5, 10))
  for owner in range(4):
    assert len([path for path in job.files(5, owner) if path.suffix != ".part"]) == 2
  if host_lost:
    job.lose(2)
  assert job.restored(4) == found
  assert job.warnings == []  # that is no damage
  assert job.files(15 - found, 0) == []


def test_a_save_that_is_not_ready_is_skipped_by_all_and_not_awaited(job: Job, monkeypatch: pytest.MonkeyPatch):
  """Process 1 is slow. Step 10 is skipped; the next save makes room when it begins."""
  slow, finish = threading.Event(), Tier._finish

  def waits(self: Tier, *given: Any) -> None:
    if self.rank == 1:
      assert slow.wait(30)
    finish(self, *given)

  monkeypatch.setattr(Tier, "_finish", waits)
  monkeypatch.setattr(saving, "SKIPS", 1)

  def work(tier: Tier) -> tuple[int, set[int]]:
    job.start(tier)
    job.save(tier, 5, wait=False)
    job.save(tier, 10, wait=False)
    slow.set()
    tier.wait()
    processes.all_gather(None)
    for step in (15, 20):
      job.save(tier, step)
    processes.all_gather(None)
    assert tier.summary.startswith("memory    3 saves in the hosts' memory, 1 skipped; training waited ")
    return tier.skipped, {portion.of.step for portion in tier.store.portions()}

  assert job.run(4, work) == [(1, {15, 20})] * 4
  (line,) = job.warnings
  assert re.search(r"1 saves in the hosts' memory in a row were skipped, .* not finished \(on process.*1.*\)", line)
  assert saving.newest(job.workdir) == 15  # whether 20 is complete is only known at the next save
  assert job.restored(4) == 20


@pytest.mark.parametrize("where", [r"/host3/3/.*-3-of-4", r"/host3/3/.*-2-of-4"])  # its own portion, and a copy
def test_a_full_memory_is_reported_once_and_costs_no_complete_save(
  where: str, job: Job, monkeypatch: pytest.MonkeyPatch
):
  write, full = os.pwrite, [""]

  def written(file: int, *given: Any) -> int:
    if full[0] and re.search(full[0], os.readlink(f"/proc/self/fd/{file}")):
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(file, *given)

  monkeypatch.setattr(os, "pwrite", written)

  def work(tier: Tier) -> None:
    job.start(tier, 5)
    processes.all_gather(None)
    full[0] = where
    for step in (10, 15):
      job.save(tier, step)
    processes.all_gather(None)
    full[0] = ""
    job.save(tier, 20)
    processes.all_gather(None)
    assert tier.complete.step == 5
    assert {portion.of.step for portion in tier.store.portions()} <= {5, 20}

  job.run(4, work)
  (line,) = job.warnings
  assert "the state of step 10 could not be kept in memory ([Errno 28] No space left on device)" in line
  assert job.restored(4) == 20


def test_each_process_of_a_host_writes_into_its_own_old_memory(job: Job):
  """That is faster than new memory. What processes have left that are no longer there is removed."""
  job.host = "all"

  def work(tier: Tier) -> list[int]:
    job.start(tier)
    files = []
    for step in (5, 10, 15):
      job.save(tier, step)
      (file,) = tier.store.own.glob(f"{step}-*-{tier.rank}-of-*")
      files.append(file.stat().st_ino)
    return files

  for first, _, third in job.run(4, work):
    assert third == first
  assert job.restored(2) == 15
  job.run(2, lambda tier: tier.keep_only(None))
  assert job.files(15, 0) == []
  assert list((job.folder / "memory").glob("*/all/*/*")) == []


def test_saves_go_on_if_somebody_removes_their_folder(job: Job):
  def work(tier: Tier) -> None:
    job.start(tier, 5)
    processes.all_gather(None)
    if not tier.rank:
      shutil.rmtree(job.folder / "memory")
    processes.all_gather(None)
    for step in (10, 15):
      job.save(tier, step)

  job.run(2, work)
  assert job.restored(2) == 15
  assert job.warnings == []


def test_only_this_user_can_read_what_is_in_memory(job: Job, monkeypatch: pytest.MonkeyPatch):
  """Also in the folder that all users share, and if the folder was there before."""
  mode = lambda path: path.stat().st_mode & 0o777
  (job.folder / "memory" / saving.key(job.workdir)).mkdir(parents=True, mode=0o755)
  job.run(2, lambda tier: job.start(tier, 5))
  assert {mode(path) for path in (job.folder / "memory").glob("*")} == {0o700}
  monkeypatch.setattr(saving, "TMPFS", str(job.folder / "shm"))
  job.given, ours = "", os.getuid()
  job.run(2, lambda tier: job.start(tier, 5))
  assert mode(job.folder / "shm" / f"meshwright-{ours}") == 0o700
  for given in ("", str(job.folder / "memory")):
    job.given = given
    monkeypatch.setattr(os, "getuid", lambda: ours + 1)
    if not given:
      (job.folder / "shm" / f"meshwright-{ours + 1}").mkdir()
    with one_sentence("checkpoint.memory_dir=", "belongs to another user", "name another folder"):
      job.run(2, job.start)
    monkeypatch.setattr(os, "getuid", lambda: ours)


def test_a_new_run_at_the_same_path_does_not_get_the_memory_of_the_old_one(job: Job):
  job.run(2, lambda tier: job.start(tier, 5))
  shutil.rmtree(job.workdir)
  job.workdir.mkdir()
  assert job.restored(2) is None
  assert job.warnings == []


@pytest.mark.parametrize(
  "error, left",
  [(None, 0), (JobError("diverged"), 0), (NotSaved("disk"), 2), (Corrupted("device 3"), 2), (OSError(), 2)],
)
def test_memory_is_given_back_at_an_orderly_end(error: Exception | None, left: int, job: Job):
  """It stays for the next start if that can go on from a newer step than storage has."""

  def work(tier: Tier) -> None:
    job.start(tier, 5)
    tier.__exit__(type(error) if error else None, error, None)

  job.run(2, work)
  assert len(job.files(5, 0)) == left
  assert saving.newest(job.workdir) == -1 if not left else True


def test_two_saves_need_memory_at_a_time_as_predicted(job: Job):
  """Own pieces and a neighbour's, of a complete save and of the one that is written. Each piece is kept twice."""
  found = []

  def work(tier: Tier) -> None:
    job.start(tier)
    for step in range(5, 40, 5):
      job.save(tier, step)
      processes.all_gather(None)
      found.append(len({portion.of for portion in tier.store.portions()}))

  job.run(4, work)
  assert max(found) == MEMORY_SAVES
  entries = [entry for path in (job.folder / "memory").glob("*/*/*/*") for entry in store.read_index(path).entries]
  assert sum(entry.piece.bytes for entry in entries) == 2 * MEMORY_SAVES * sum(x.nbytes for x in VALUES.values())


@pytest.mark.parametrize("name", names())
def test_theory_is_what_each_strategy_keeps(name: str):
  """Numbers such as the step are not in the theory."""
  runner = strategy(name, program())
  kept = pieces.shared_out(pieces.held(record.named(runner.abstract_state())), 1)[0]
  counted = sum(piece.bytes for piece in kept if piece.shape)
  assert predicted.in_hosts(Case.of(runner, 16, "cpu")) * runner.layout.device_count == 2 * MEMORY_SAVES * counted


@pytest.mark.full
def test_arrays_of_devices_go_from_one_layout_to_another(tmp_path: Path):
  """Saved under FSDP on 8 devices, while the next step reuses the memory of the state. A single process."""
  runner = strategy("fsdp", program(model__depth=1))
  batch = runner.shard(random_batch(runner.program, 16), 16)
  state, _ = runner.train_step(initial_state(runner), batch)
  expected = [np.array(x) for x in jax.tree.leaves(state)]
  (tmp_path / "run").mkdir()
  asked = config(checkpoint__memory_every=1, checkpoint__memory_dir=str(tmp_path / "memory"))

  def tier() -> Tier:
    return Tier(asked, tmp_path / "run", pytest.fail)

  ours = tier()
  ours.prepare(record.named(runner.abstract_state()))
  ours.save(state, RUN, LoopState(1, False))
  runner.train_step(state, batch)
  ours.wait()
  for name, devices, fields in [
    ("two_d", 8, {}), ("zero1", 4, {}), ("tensor_parallel", 2, {}), ("pmap_ddp", 8, {}), ("single", 1, {}),
    ("fsdp", 8, {"optimizer__on_host": True}),
  ]:  # fmt: skip
    other = strategy(name, program(model__depth=1, **fields), devices)
    found, saved = recovery.restore(tier(), other.abstract_state(), RUN, -1, pytest.fail)
    assert saved["loop"]["step"] == 1
    for x, y, like in zip(jax.tree.leaves(found), expected, jax.tree.leaves(other.abstract_state()), strict=True):
      assert x.sharding == like.sharding
      np.testing.assert_array_equal(x, y, err_msg=name)
  other = {"params": {"embedding": jax.ShapeDtypeStruct((3, 3), "float32", sharding=runner.state_sharding.step)}}
  with one_sentence("the state of step 1 in the hosts' memory", "another model or optimizer"):
    recovery.restore(tier(), other, RUN, -1, pytest.fail)


def test_each_piece_is_kept_once_and_evenly():
  """Of 8 processes, two each hold the same quarter of the rows; a scale is everywhere."""
  quarter = lambda i: ((6 * i, 6 * i + 6), (0, 5))
  found = [pieces.Held(pieces.Piece("w", quarter(i), "float32"), frozenset({i, i + 4})) for i in range(4)]
  found += [pieces.Held(pieces.Piece(f"s{i}", ((0, 30),), "float32"), frozenset(range(8))) for i in range(4)]
  shares = pieces.shared_out(found, 8)
  assert sorted(piece for share in shares for piece in share) == sorted(one.piece for one in found)
  assert [sum(piece.bytes for piece in share) for share in shares] == [120] * 8
  assert all(rank in one.processes for one in found for rank in range(8) if one.piece in shares[rank])


def test_pieces_of_one_layout_make_those_of_another():
  whole = np.arange(12 * 10).reshape(12, 10)
  rows = {((4 * i, 4 * i + 4), (0, 10)): whole[4 * i : 4 * i + 4] for i in range(3)}
  target = ((2, 11), (5, 10))
  assert pieces.missing(target, rows) == 0
  np.testing.assert_array_equal(pieces.assembled(target, "int64", rows), whole[2:11, 5:])
  del rows[((4, 8), (0, 10))]
  assert pieces.missing(target, rows) == 4 * 5
  assert pieces.overlap((), ()) == ()  # a number is a piece of itself


@pytest.mark.parametrize(
  "hosts, found",
  [("a", [0]), ("aa", [1, 0]), ("abcd", [1, 2, 3, 0]), ("aabb", [2, 3, 0, 1]), ("aabbcc", [2, 3, 4, 5, 0, 1])],
)
def test_a_neighbour_is_on_another_host_where_there_is_one(hosts: str, found: list[int]):
  assert pieces.neighbours(list(hosts)) == found


def test_neighbours_of_many_processes_are_found_with_one_search(monkeypatch: pytest.MonkeyPatch):
  """One search compares each host with all others."""
  searches, offset = [], pieces.offset
  monkeypatch.setattr(pieces, "offset", lambda hosts: searches.append(1) or offset(hosts))
  assert pieces.neighbours([f"host{i // 2}" for i in range(16)]) == [*range(2, 16), 0, 1]
  assert len(searches) == 1


@pytest.mark.parametrize(
  "coordinator, found",
  [
    ("host0:8476", "10.0.0.7"),  # this host, which knows itself as 127.0.1.1
    ("host1:8476", "10.0.0.7"),
    ("", "10.0.0.7"),
    ("127.0.0.1:8476", "127.0.0.1"),
    ("localhost:8476", "127.0.0.1"),
  ],
)
def test_a_process_listens_where_others_can_reach_it(coordinator: str, found: str, monkeypatch: pytest.MonkeyPatch):
  class Probe:
    def __init__(self, *_: Any) -> None:
      pass

    def __enter__(self) -> "Probe":
      return self

    def __exit__(self, *_: object) -> None:
      pass

    def connect(self, address: tuple[str, int]) -> None:
      self.name = "127.0.0.1" if address[0] in ("host0", "127.0.0.1", "localhost") else "10.0.0.7"

    def getsockname(self) -> tuple[str, int]:
      return self.name, 1

  monkeypatch.setattr(exchange.socket, "socket", Probe)
  assert exchange.own_address(coordinator) == found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
  found = Server(Store(tmp_path / "host", 0), b"secret", "127.0.0.1")
  yield found
  found.close()


def written(folder: Path) -> Path:
  """A file with one piece of 100 kB."""
  portion, piece = Portion(Save(5, "ab", 2), 1), pieces.Piece("x", ((0, 100_000),), "uint8")
  file = Store(folder, 1).create(portion, piece.bytes)
  file.put(0, np.full(100_000, 7, np.uint8))
  file.finish(store.tail([Entry(piece, 0, store.zlib.crc32(bytes([7]) * 100_000))], RUN))
  return file.path


def test_a_sender_that_is_killed_leaves_no_file(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  path = written(tmp_path / "other")
  portion = Portion(Save(5, "ab", 2), 1)
  monkeypatch.setattr(exchange, "CHUNK", 1000)
  with Peer(server.address, b"secret") as peer:
    with path.open("rb") as source:
      peer._ask(do="keep", portion=portion.file, bytes=path.stat().st_size)
      peer._connection.send_bytes(source.read(1000))
    wait_for(lambda: list(server.store.own.glob("*.part")))
  wait_for(lambda: not list(server.store.own.iterdir()))
  with Peer(server.address, b"secret") as peer:
    peer.keep(portion, path)
    assert server.store.portions() == [portion]
    (entry,) = peer.index(portion).entries
    assert peer.read(portion, entry) == bytes([7]) * 100_000
    with pytest.raises(Damaged, match="it is gone"):
      peer.index(Portion(Save(6, "ab", 2), 1))


def test_a_copy_that_changes_on_its_way_is_not_kept(server: Server, tmp_path: Path):
  path = written(tmp_path / "other")
  raw = bytearray(path.read_bytes())
  raw[50] ^= 1
  path.write_bytes(raw)
  with Peer(server.address, b"secret") as peer, pytest.raises(Damaged, match="x is not what was sent"):
    peer.keep(Portion(Save(5, "ab", 2), 1), path)
  assert server.store.portions() == []


def test_strangers_get_nothing(server: Server, tmp_path: Path):
  """Neither without the secret, nor a file that is not a portion."""
  path = written(tmp_path / "other")
  with Peer(server.address, b"guess") as peer, pytest.raises(exchange.Unreachable, match="does not answer"):
    peer.keep(Portion(Save(5, "ab", 2), 1), path)
  assert server.store.portions() == []
  with Peer(server.address, b"secret") as peer:
    for name in ("../../etc/passwd", "", 3, "5-ab-1-of-2/x"):
      with pytest.raises(Damaged):
        peer._ask(do="index", portion=name)
  with socket.create_connection(server.address) as silent:
    silent.send(b"\xff" * 100)
  with Peer(server.address, b"secret") as peer:
    peer.keep(Portion(Save(5, "ab", 2), 1), path)


def test_strangers_that_send_a_byte_at_a_time_have_one_deadline_for_all(
  server: Server, monkeypatch: pytest.MonkeyPatch
):
  """The clock is the test's: each byte comes a second after the one before, and none comes after the deadline."""
  now, end = [0.0], exchange.STRANGE
  monkeypatch.setattr(exchange.time, "monotonic", lambda: now[0])

  class Slow:
    """A stranger that sends the right secret, but slowly."""

    def __init__(self) -> None:
      self.left = exchange.SIZE.pack(6) + b"secret"

    def settimeout(self, seconds: float | None) -> None:
      assert seconds is None or seconds <= max(1e-3, end - now[0])

    def recv(self, size: int) -> bytes:
      now[0] += 1.0
      byte, self.left = self.left[:1], self.left[1:]
      return byte

  slow = Slow()
  with pytest.raises(EOFError):
    exchange._secret_of(slow)  # type: ignore[arg-type]
  assert now[0] == exchange.STRANGE + 1
  assert slow.left == b"cret"
  monkeypatch.setattr(exchange, "STRANGE", 100.0)
  end = now[0] + 100.0
  assert exchange._secret_of(Slow()) == b"secret"  # type: ignore[arg-type]


def test_a_request_that_nests_too_deep_gets_an_answer(server: Server):
  with Peer(server.address, b"secret") as peer:
    peer._connection.send_bytes(b"[" * 100_000)
    with pytest.raises(Damaged, match="recursion"):
      peer._answer()
    peer._connection.send_bytes(b"{}")  # and the next one, too
    with pytest.raises(Damaged, match="portion"):
      peer._answer()


@pytest.mark.parametrize("sent", [b"", b"\0\0", b"\0\0\0\6sec"])
def test_a_stranger_that_says_nothing_is_not_waited_for(
  sent: bytes, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  """Nor do many of them keep a process of the job from being served."""
  monkeypatch.setattr(exchange, "STRANGE", 0.05)
  monkeypatch.setattr(exchange, "ANSWER", 5.0)
  strangers = [socket.create_connection(server.address, timeout=5) for _ in range(2 * exchange.STRANGERS)]
  for stranger in strangers:
    stranger.sendall(sent)
  with Peer(server.address, b"secret") as peer:
    peer.keep(Portion(Save(5, "ab", 2), 1), written(tmp_path / "other"))
  for stranger in strangers:
    with contextlib.suppress(ConnectionResetError):
      assert stranger.recv(1) == b""
    stranger.close()


def test_a_process_may_take_its_time_between_two_requests(
  server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  monkeypatch.setattr(exchange, "STRANGE", 0.05)
  monkeypatch.setattr(exchange, "ANSWER", 0.05)
  portion = Portion(Save(5, "ab", 2), 1)
  with Peer(server.address, b"secret") as peer:
    peer.keep(portion, written(tmp_path / "other"))
    time.sleep(0.15)
    assert len(peer.index(portion).entries) == 1


def test_a_neighbour_that_stops_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """It takes the connection and a part of the file, and answers no more."""
  monkeypatch.setattr(exchange, "ANSWER", 0.05)
  path, found = written(tmp_path / "other"), queue.SimpleQueue()
  with socket.create_server(("127.0.0.1", 0)) as stopped:

    def send() -> None:
      try:
        with Peer(stopped.getsockname()[:2], b"secret") as peer:
          peer.keep(Portion(Save(5, "ab", 2), 1), path)
      except exchange.Unreachable as error:
        found.put(str(error))

    threading.Thread(target=send, daemon=True).start()
    assert "it was silent for 0 s" in found.get(timeout=10)


def test_a_server_without_free_descriptors_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  class Full:
    tried = 0

    def accept(self) -> None:
      self.tried += 1
      server._closed = self.tried == 3
      raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

  pauses: list[float] = []
  server = Server.__new__(Server)
  server._closed, server._socket, server._strangers = False, Full(), threading.BoundedSemaphore(1)
  monkeypatch.setattr(exchange.time, "sleep", pauses.append)
  server._accept()
  assert pauses == [exchange.PAUSE] * 2


def wait_for(happened: Callable[[], Any]) -> None:
  until = time.monotonic() + 20
  while not happened():
    assert time.monotonic() < until
    time.sleep(0.005)


def test_a_mistake_is_one_sentence(job: Job, monkeypatch: pytest.MonkeyPatch):
  with one_sentence("checkpoint.memory_every=-1", "use 0 to switch it off"):
    StepPlan.of(config(checkpoint__memory_every=-1))
  (job.folder / "memory").touch()
  with one_sentence("checkpoint.memory_dir=", "cannot be written"):
    job.run(2, job.start)
  (job.folder / "memory").unlink()
  monkeypatch.setattr(saving.shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
  with one_sentence("checkpoint.memory_dir=", "GB free", "use a larger tmpfs, or checkpoint.memory_every=0"):
    job.run(2, job.start)
  monkeypatch.undo()
