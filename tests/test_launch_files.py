"""The manifest of docs/launch/ for Kubernetes, as far as it can be tested without it. tests/cluster/ tests slurm.sh."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import ROOT

from reporting import heartbeat
from runtime.command_line import BAD_INPUT, DIVERGED, FAILED


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
  return documents()[0]["spec"]


def documents() -> list[dict[str, Any]]:
  return list(yaml.safe_load_all((ROOT / "docs/launch/jobset.yaml").read_text()))


def action(manifest: dict[str, Any], status: int | None) -> str:
  """What happens to the JobSet if a pod ends with this exit status, or without one because its node is gone."""
  job = manifest["replicatedJobs"][0]["template"]["spec"]
  reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
  for i, rule in enumerate(job["podFailurePolicy"]["rules"]):
    codes = rule.get("onExitCodes")
    if (status in codes["values"]) if codes else status is None:
      assert rule["action"] == "FailJob"
      reason = "PodFailurePolicy"
      message = f"Container train for pod a/b failed with exit code {status} matching FailJob rule at index {i}"
      break
  for rule in manifest["failurePolicy"]["rules"]:
    patterns = rule.get("onJobFailureMessagePatterns", [""])
    if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
      return rule["action"]
  return "RestartJobSet"


@pytest.mark.parametrize(
  "status, expected",
  [
    (BAD_INPUT, "FailJobSet"),
    (DIVERGED, "FailJobSet"),
    (75, "RestartJobSetAndIgnoreMaxRestarts"),  # stopped early: the script's own status
    (None, "RestartJobSetAndIgnoreMaxRestarts"),  # preempted, or its node is gone
    (FAILED, "RestartJobSet"),  # also what may pass: storage that does not answer, a workdir in use
    (137, "RestartJobSet"),  # killed, also by the probe
  ],
)
def test_what_would_fail_again_ends_the_jobset(manifest: dict[str, Any], status: int | None, expected: str):
  assert action(manifest, status) == expected


def test_the_guide_lists_the_exit_statuses():
  table = re.search(r"\| Exit status .*?\n\n", (ROOT / "docs/cluster.md").read_text(), re.DOTALL)[0]
  assert [int(found) for found in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)] == [0, FAILED, BAD_INPUT, DIVERGED]


def test_a_run_that_was_stopped_early_is_told_from_a_finished_one():
  """tests/test_resume.py tests what the command says."""
  for name in ("slurm.sh", "jobset.yaml"):
    assert "-m checkpointing.finished" in (ROOT / "docs/launch" / name).read_text()


def test_the_number_of_pods_is_the_same_everywhere(manifest: dict[str, Any]):
  job = manifest["replicatedJobs"][0]["template"]["spec"]
  (container,) = job["template"]["spec"]["containers"]
  (processes,) = [variable["value"] for variable in container["env"] if variable["name"] == "PROCESSES"]
  assert job["parallelism"] == job["completions"] == int(processes)


def test_a_pod_has_no_more_rights_than_it_needs(manifest: dict[str, Any]):
  pod = manifest["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
  (container,) = pod["containers"]
  assert pod["securityContext"]["runAsNonRoot"] is True
  assert pod["securityContext"]["runAsUser"] > 0
  assert pod["automountServiceAccountToken"] is False
  own = container["securityContext"]
  assert (own["readOnlyRootFilesystem"], own["allowPrivilegeEscalation"]) == (True, False)
  assert own["capabilities"] == {"drop": ["ALL"]}
  # All that a run writes to is a volume: the workdir, the caches below HOME, temporary files, shared memory.
  mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
  assert {volume["name"] for volume in pod["volumes"]} == set(mounted.values())
  given = {variable["name"]: variable.get("value", "") for variable in container["env"]}
  assert given["HOME"] in mounted
  assert given["WORKDIR"].rpartition("/")[0] in mounted
  assert {"/tmp", "/dev/shm"} <= mounted.keys()  # in the pod


def test_only_pods_of_the_job_may_connect_to_its_pods():
  job, policy = documents()
  assert policy["kind"] == "NetworkPolicy"
  own = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": job["metadata"]["name"]}}
  assert policy["spec"] == {
    "podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}],
  }  # fmt: skip


@pytest.mark.parametrize(
  "image", ["meshwright:latest", "meshwright", "meshwright@sha256:DIGEST", "a@sha256:" + "0" * 64]
)
def test_an_image_without_a_digest_is_refused(image: str, manifest: dict[str, Any], tmp_path: Path):
  """Runs the manifest's own script, in which `python` notes that it was called."""
  (container,) = manifest["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
  assert "@sha256:" in container["image"]
  assert {"name": "IMAGE", "value": container["image"]} in container["env"]
  (tmp_path / "python").write_text(f"#!/bin/sh\ntouch {tmp_path}/called\n")
  (tmp_path / "python").chmod(0o755)
  given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "IMAGE": image, "WORKDIR": "runs/a"}
  done = subprocess.run(
    [*container["command"], *container["args"]], cwd=tmp_path, env=given, capture_output=True, text=True, check=False
  )
  good = image.endswith("0")
  assert (done.returncode == 0, (tmp_path / "called").exists()) == (good, good), done
  assert done.stderr == "" if good else f"error: image={image} is no digest" in done.stderr


@pytest.mark.parametrize(
  "workdir, minutes, alive", [("run", 10, True), ("run", 40, False), ("gs://bucket/run", 40, False)]
)
def test_the_probe_ends_a_pod_whose_process_hangs(
  manifest: dict[str, Any], workdir: str, minutes: int, alive: bool, tmp_path: Path
):
  """Runs the manifest's own command. The process has been compiling for so many minutes."""
  (container,) = manifest["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
  now = time.time()
  beat = dict.fromkeys(heartbeat.READ, 0) | {"host": "", "wall_time": {}, "began": now, "time": now, "doing": "compile"}
  beat["since"] = now - 60 * minutes
  folder = tmp_path / workdir.replace("gs://", "runs/gs/") / heartbeat.FOLDER
  folder.mkdir(parents=True)
  (folder / "1.json").write_text(json.dumps(beat))
  path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
  given = os.environ | {"WORKDIR": workdir, "JOB_COMPLETION_INDEX": "1", "PATH": path, "PYTHONPATH": str(ROOT)}
  command = container["livenessProbe"]["exec"]["command"]
  done = subprocess.run(command, cwd=tmp_path, env=given, stdout=subprocess.PIPE, text=True, check=False)
  assert (done.returncode == 0) == alive, done
  # It takes a moment until the program looks at the clock.
  assert bool(re.search(r"process 1 made no progress for 24\d\d s \(compile\)", done.stdout)) == (not alive)
