"""Where JAX's coordinator listens: it asks nobody for a secret, so nobody else should reach it."""

import contextlib
import glob
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest
from helpers import ROOT, config, one_sentence
from jobs import flags

from job.slurm import Nodes
from runtime import processes

NAMES = {
  "alone": ["10.1.2.3"], "alone6": ["fd00::7"], "several": ["10.1.2.3", "10.1.2.4"], "named-so": ["127.0.1.1"],
  "far": ["198.51.100.1"], "localhost": ["127.0.0.1", "::1"], "127.0.0.1": ["127.0.0.1"], "::1": ["::1"],
}  # fmt: skip


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
  """Names of machines; this one has all of these addresses but that of "far"."""

  def found(host: str, port: int, type: int) -> list[Any]:  # as the socket module has it
    if host not in NAMES:
      raise socket.gaierror
    return [(None, type, 0, "", (address, port)) for address in NAMES[host]]

  monkeypatch.setattr(socket, "getaddrinfo", found)
  monkeypatch.setattr(processes, "_is_free", lambda host, port: host != "198.51.100.1")
  monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)


@pytest.mark.parametrize(
  "host, where",
  [
    ("127.0.0.1", "127.0.0.1:5"), ("localhost", "127.0.0.1:5"), ("[::1]", "[::1]:5"), ("alone", "10.1.2.3:5"),
    ("alone6", "[fd00::7]:5"), ("several", None), ("named-so", None), ("far", None), ("unknown", None),
  ],
)  # fmt: skip
@pytest.mark.usefixtures("names")
def test_it_listens_at_the_address_that_is_named(
  host: str, where: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
  given: list[dict[str, Any]] = []
  monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
  monkeypatch.setattr(jax.distributed, "initialize", lambda **fields: given.append(fields))
  fields = config(distributed__coordinator=f"{host}:5", distributed__processes=2, distributed__process=0).distributed
  processes.join(fields)
  fields.process = 1
  processes.join(fields)
  monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "0.0.0.0:5")
  fields.process = 0
  processes.join(fields)
  assert [one.get("coordinator_bind_address") for one in given] == [where, None, None]
  assert all(one["coordinator_address"] == f"{host}:5" for one in given)
  notes = capsys.readouterr().err.splitlines()
  assert len(notes) == (host not in ("127.0.0.1", "localhost", "[::1]"))
  for note in notes:
    assert "where JAX asks nobody for a secret" in note
    assert (where.rpartition(":")[0].strip("[]") if where else "all addresses of this machine, port 5") in note


def test_what_the_cluster_says_is_passed_on(monkeypatch: pytest.MonkeyPatch):
  step = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_LOCALID": "1", "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4", "SLURM_STEP_NUM_NODES": "2",
  }  # fmt: skip
  monkeypatch.delenv("JAX_LOCAL_DEVICE_IDS", raising=False)
  assert processes._of_cluster(1) == {}  # there is none
  for name, value in step.items():
    monkeypatch.setenv(name, value)
  found = processes._of_cluster(1)
  port = found["coordinator_address"].rpartition(":")[2]
  assert found == {
    "coordinator_address": f"localhost:{port}", "num_processes": 4, "process_id": 3, "local_device_ids": [1],
  }  # fmt: skip
  monkeypatch.setenv("SLURM_NTASKS", "1")
  monkeypatch.setenv("SLURM_PROCID", "0")
  monkeypatch.setenv("SLURM_STEP_NODELIST", "n1")
  assert processes._of_cluster(1)["coordinator_address"] == f"127.0.0.1:{port}"  # one process meets nobody
  monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "0,1")
  assert "local_device_ids" not in processes._of_cluster(1)


def test_a_job_on_one_node_of_slurm_meets_at_the_loopback(monkeypatch: pytest.MonkeyPatch):
  where = object.__new__(Nodes)
  monkeypatch.setattr("job.slurm._answer", lambda *command: "NodeName=n1 NodeAddr=10.1.2.3 State=IDLE")
  where.nodes, where.unit = ["n1"], 2
  assert where.address(0) == "127.0.0.1"
  where.nodes = ["n1", "n2"]
  assert where.address(0) == "10.1.2.3"


PROXY = "http://127.0.0.1:9"  # where nobody answers


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(
  "proxies, direct",
  [
    ({}, None),
    ({"http_proxy": PROXY}, "alone"),
    ({"HTTPS_PROXY": PROXY, "NO_PROXY": "x.org"}, "x.org,alone"),
    ({"https_proxy": PROXY, "no_proxy": "x.org", "no_grpc_proxy": "y.org"}, "y.org,alone"),
  ],
)
def test_processes_meet_past_a_proxy(proxies: dict, direct: str | None, monkeypatch: pytest.MonkeyPatch):
  """A cluster's nodes often have one for the web, which cannot lead to the coordinator."""
  for name in [name for name in os.environ if "proxy" in name.lower()]:
    monkeypatch.delenv(name)
  for name, value in proxies.items():
    monkeypatch.setenv(name, value)
  given: list[tuple[Any, Any]] = []
  monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
  known = lambda **_: given.append((os.environ.get("no_grpc_proxy"), jax.config.read("jax_check_proxy_envs")))  # noqa: SIM112
  monkeypatch.setattr(jax.distributed, "initialize", known)
  jax.config.update("jax_check_proxy_envs", True)
  fields = config(distributed__coordinator="alone:5", distributed__processes=2, distributed__process=1).distributed
  processes.join(fields)
  assert given == [(direct, direct is None)]
  if direct:
    monkeypatch.delenv("no_grpc_proxy")


@pytest.mark.full
def test_a_job_trains_past_a_proxy(tmp_path: Path):
  command = [sys.executable, "-m", "tools.launch", "--processes=2", "--devices-per-process=1", "--"]
  given = os.environ | dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), PROXY)
  asked = flags("fsdp", tmp_path / "run", steps=2, distributed__timeout=60)
  done = subprocess.run([*command, *asked], cwd=ROOT, env=given, capture_output=True, text=True, timeout=200)
  assert done.returncode == 0, done.stdout + done.stderr
  assert not re.search("detected proxy|proxy handshake", done.stdout + done.stderr)


@pytest.mark.parametrize(
  "port, says", [("tcp://10.0.0.1:80", None), ("8476", None), ("80 80", "is not a port"), ("x", "is not")]
)
def test_a_port_that_kubernetes_has_named_is_not_taken_for_the_coordinators(
  port: str, says: str | None, monkeypatch: pytest.MonkeyPatch
):
  """A service called `jax-coordinator` gives every pod JAX_COORDINATOR_PORT=tcp://..., which JAX reads as a port."""
  monkeypatch.setenv("JAX_COORDINATOR_PORT", port)
  if says:
    with one_sentence(f"JAX_COORDINATOR_PORT={port!r}", says, "unset it"):
      processes.join(config().distributed)
  else:
    processes.join(config().distributed)  # alone
    assert os.environ.get("JAX_COORDINATOR_PORT") == (None if "://" in port else port)


def listening(pids: set[int]) -> set[str]:
  """The addresses at which these processes listen, in the form of /proc."""
  sockets = set()
  for pid in pids:
    for descriptor in glob.glob(f"/proc/{pid}/fd/*"):
      with contextlib.suppress(OSError):
        sockets |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(descriptor)))
  lines = [line.split() for file in ("tcp", "tcp6") for line in Path("/proc/net", file).read_text().splitlines()[1:]]
  return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and line[9] in sockets}


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_job_on_one_machine_listens_at_the_loopback_alone(tmp_path: Path):
  command = [sys.executable, "-m", "tools.launch", "--processes=2", "--devices-per-process=1", "--"]
  asked = flags("fsdp", tmp_path / "run", steps=2000, log_every=1)
  with subprocess.Popen([*command, *asked], cwd=ROOT, stdout=subprocess.PIPE, text=True) as job:
    assert job.stdout
    try:
      next(line for line in job.stdout if "[0] train " in line)
      children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
      found = listening({job.pid, *map(int, children)})
    finally:
      job.terminate()
      until = time.monotonic() + 60
      while job.poll() is None and time.monotonic() < until and job.stdout.readline():
        pass
  assert found
  assert found <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
