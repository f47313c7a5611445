#!/usr/bin/env bash
# Tests on a real SLURM that a requeued job resumes exactly: `make test-cluster`.
#
# Starts a cluster of this one machine, and installs Debian's packages first if they are missing. Then launch/slurm.sh
# runs a job of 2 tasks twice: uninterrupted, and with two interruptions. The first is `scontrol requeue`. The second is
# SIGTERM to the tasks only, as before a time limit; launch/slurm.sh then requeues its job itself. check.py compares the
# files of the two jobs. The cluster keeps its state in a temporary folder and does not touch the system's own SLURM and
# munge.

set -euo pipefail
cd "$(dirname "$0")/../.."

STEPS=40
SECONDS_TO_WAIT=300 # at most, for each event
FLAGS=(--config=configs/fsdp.py:tiny "--config.steps=$STEPS" --config.log_every=1 --config.simulated_devices=4)

fail() {
  for log in "$folder"/*.log; do
    if [ -f "$log" ]; then
      echo "--- the end of $(basename "$log")" >&2
      tail -n 20 "$log" >&2
    fi
  done
  echo "failed: $*" >&2
  exit 1
}

# Waits until a command succeeds: wait_for WHAT COMMAND...
wait_for() {
  local what="$1" until=$((SECONDS + SECONDS_TO_WAIT))
  shift
  until "$@"; do
    if [ "$SECONDS" -ge "$until" ]; then
      fail "waited $SECONDS_TO_WAIT s for $what"
    fi
    sleep 0.5
  done
}

install_packages() {
  for program in slurmctld slurmd srun sbatch munged; do
    PATH="$PATH:/usr/sbin" command -v "$program" >/dev/null || missing="$program"
  done
  if [ -n "${missing:-}" ]; then
    local sudo=()
    if [ "$(id -u)" != 0 ]; then
      sudo=(sudo -n)
    fi
    if ! command -v apt-get >/dev/null || ! "${sudo[@]}" true 2>/dev/null; then
      echo "make test-cluster needs SLURM and munge ($missing is missing): apt-get install slurm-wlm munge" >&2
      exit 1
    fi
    echo "installing slurm-wlm and munge"
    "${sudo[@]}" apt-get update -qq
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge \
      >"$folder/apt.log" 2>&1 || fail "apt-get could not install slurm-wlm and munge"
  fi
}

start_cluster() {
  local node port
  node="$(hostname -s)"
  getent hosts "$node" >/dev/null || fail "this machine's name, $node, has no address; add it to /etc/hosts"
  port="$(.venv/bin/python -c 'import socket; s = socket.create_server(("", 0)); print(s.getsockname()[1])')"
  mkdir "$folder/state" "$folder/spool"
  (umask 077 && head -c 1024 /dev/urandom >"$folder/munge.key")

  # No accounting, no cgroups. FirstJobId is random because the coordinator's port depends on the job's number. A
  # requeued job waits for cred_expire seconds (120 by default), and the scheduler runs every bf_interval seconds.
  cat >"$folder/slurm.conf" <<END
ClusterName=test
SlurmctldHost=$node(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port < 65535 ? port + 1 : port - 1))
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=5
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
FirstJobId=$((RANDOM + 1))
NodeName=$node NodeAddr=127.0.0.1 CPUs=2
PartitionName=all Nodes=$node Default=YES
END
  export SLURM_CONF="$folder/slurm.conf"
  munged --socket="$folder/munge.socket" --key-file="$folder/munge.key" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
  slurmctld
  slurmd
  wait_for "the node" node_is idle
}

stop_cluster() {
  if [ -f "$folder/slurmctld.pid" ] && [ -n "$(squeue --noheader 2>/dev/null)" ]; then
    scancel --signal=KILL --user="$(id -un)" 2>/dev/null || true
    scancel --user="$(id -un)" 2>/dev/null || true
    for _ in $(seq 60); do
      [ -z "$(squeue --noheader 2>/dev/null)" ] || sleep 0.5
    done
  fi
  for name in slurmd slurmctld munged; do
    if [ -f "$folder/$name.pid" ]; then
      local pid
      pid="$(cat "$folder/$name.pid")"
      kill "$pid" 2>/dev/null || true
      for _ in $(seq 20); do
        ! kill -0 "$pid" 2>/dev/null || sleep 0.5
      done
    fi
  done
  rm -rf "$folder"
}

# Conditions to wait for. The last two fail if $job has ended.
node_is() { [ "$(sinfo --noheader --format=%T 2>/dev/null)" = "$1" ]; }
has_ended() { [[ "$(state_of "$1")" =~ ^(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY|BOOT_FAIL)$ ]]; }
has_step() { still_there && grep -qs "\"step\": $2, \"split\": \"train\"" "$folder/$1/metrics.jsonl"; }
has_resumed() { still_there && [ "$(grep -cs 'resumed   at step' "$folder/$1.log")" = "$2" ]; }

still_there() { ! has_ended "$job" || fail "the job has ended as $(state_of "$job"), too early"; }
state_of() { scontrol --oneliner show job "$1" | grep -o 'JobState=[A-Z_]*' | cut -d= -f2; }

# Prints the job's number: submit NAME.
submit() {
  sbatch --parsable --nodes=1 --ntasks-per-node=2 --gpus-per-node=0 --output="$folder/$1.log" launch/slurm.sh \
    "${FLAGS[@]}" --workdir="$folder/$1"
}

# Waits until a job has completed, and fails if it ended otherwise: finish JOB NAME.
finish() {
  wait_for "the end of the $2 job" has_ended "$1"
  [ "$(state_of "$1")" = COMPLETED ] || fail "the $2 job has ended as $(state_of "$1")"
}

folder="$(mktemp -d)"
chmod 755 "$folder" # otherwise munge refuses to put its socket there
trap stop_cluster EXIT
export PATH="$PATH:/usr/sbin" JAX_PLATFORMS=cpu
install_packages
start_cluster
echo "$(slurmctld -V), one node"

echo "the uninterrupted job"
job="$(submit uninterrupted)"
finish "$job" uninterrupted

echo "the interrupted job"
job="$(submit interrupted)"
wait_for "step 6" has_step interrupted 6
echo "scontrol requeue"
scontrol requeue "$job"
wait_for "the requeued job to resume" has_resumed interrupted 1
wait_for "step 24" has_step interrupted 24
echo "scancel --signal=TERM"
scancel --signal=TERM "$job"
wait_for "the job to requeue itself and resume" has_resumed interrupted 2
finish "$job" interrupted

.venv/bin/python tests/cluster/check.py "$folder" "$STEPS" || fail "the requeued job did not resume exactly"
echo "passed in $SECONDS s: a job of 2 tasks on $(slurmctld -V) that was requeued twice equals the uninterrupted one"
