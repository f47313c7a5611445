#!/usr/bin/env bash
# Tests on a real SLURM that a job heals, and that a requeued job resumes exactly: `make test-cluster`.
#
# Starts a cluster of two nodes, both on this machine, and installs Debian's packages first if they are missing. Then
# docs/launch/slurm.sh runs a job of a task on each node, several times:
# - uninterrupted
# - hurt: a task is killed; a task is stopped, so that the other one waits; and then the first node fails, so that the
#   job is requeued
# - on fewer nodes: the second node fails, and the job goes on with the first one alone
# - interrupted twice: by `scontrol requeue`, and by SIGTERM to the tasks only, as before a time limit. docs/launch/slurm.sh
#   then requeues its job itself
# check.py compares the files of these jobs. The cluster keeps its state in a temporary folder and does not touch the
# system's own SLURM and munge.

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
  mkdir "$folder/state" "$folder/spool-n1" "$folder/spool-n2"
  (umask 077 && head -c 1024 /dev/urandom >"$folder/munge.key")

  # No accounting, no cgroups. A requeued job waits for cred_expire seconds (120 by default), the scheduler runs every
  # bf_interval seconds, and a node that does not answer for SlurmdTimeout seconds (300 by default) is down.
  cat >"$folder/slurm.conf" <<END
ClusterName=test
SlurmctldHost=$node(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=5
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
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
SlurmdTimeout=15
NodeName=n1 NodeHostName=$node NodeAddr=127.0.0.1 Port=$((port < 65000 ? port + 1 : port - 1)) CPUs=2
NodeName=n2 NodeHostName=$node NodeAddr=127.0.0.1 Port=$((port < 65000 ? port + 2 : port - 2)) CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES
END
  export SLURM_CONF="$folder/slurm.conf"
  munged --socket="$folder/munge.socket" --key-file="$folder/munge.key" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
  slurmctld
  slurmd -N n1
  slurmd -N n2
  wait_for "the nodes" nodes_are idle
}

stop_cluster() {
  if [ -f "$folder/slurmctld.pid" ] && [ -n "$(squeue --noheader 2>/dev/null)" ]; then
    scancel --signal=KILL --user="$(id -un)" 2>/dev/null || true
    scancel --user="$(id -un)" 2>/dev/null || true
    for _ in $(seq 60); do
      [ -z "$(squeue --noheader 2>/dev/null)" ] || sleep 0.5
    done
  fi
  for name in slurmd-n1 slurmd-n2 slurmctld munged; do
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
nodes_are() { [ "$(sinfo --noheader --format=%T 2>/dev/null)" = "$1" ]; }
has_ended() { [[ "$(state_of "$1")" =~ ^(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY|BOOT_FAIL)$ ]]; }
has_step() { still_there && grep -qs "\"step\": $2, \"split\": \"train\"" "$folder/$1/metrics.jsonl"; }
has_restarted() { still_there && [ "$(grep -cs '^restart  ' "$folder/$1.log")" = "$2" ]; }
has_resumed() { still_there && [ "$(grep -cs 'resumed   at step' "$folder/$1.log")" = "$2" ]; }

is_pending() { [ "$(state_of "$job")" = PENDING ]; }

still_there() { ! has_ended "$job" || fail "the job has ended as $(state_of "$job"), too early"; }
state_of() { scontrol --oneliner show job "$1" | grep -o 'JobState=[A-Z_]*' | cut -d= -f2; }

# Ends all that SLURM runs on a node, as if its power failed: first what would report it: fail_node NODE.
fail_node() {
  local pid parent tasks=() steps=()
  for pid in $(grep -lxz "SLURMD_NODENAME=$1" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3); do
    if grep -qxz "SLURM_CONF=$SLURM_CONF" "/proc/$pid/environ" 2>/dev/null; then
      tasks+=("$pid")
      parent="$(ps -o ppid= -p "$pid" | tr -d ' ')"
      [ "$(cat "/proc/$parent/comm" 2>/dev/null)" != slurmstepd ] || steps+=("$parent")
    fi
  done
  kill -KILL "$(cat "$folder/slurmd-$1.pid")" "${steps[@]}" "${tasks[@]}" 2>/dev/null || true
}

# Prints the process number of a task: pid_of NAME RANK.
pid_of() { grep -o '"pid": [0-9]*' "$folder/$1/heartbeats/$2.json" | grep -o '[0-9]*'; }

# Prints the job's number: submit NAME [FLAGS ...].
submit() {
  sbatch --parsable --nodes=2 --ntasks-per-node=1 --gpus-per-node=0 --output="$folder/$1.log" docs/launch/slurm.sh \
    "${FLAGS[@]}" --workdir="$folder/$1" "${@:2}"
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
echo "$(slurmctld -V), two nodes"

echo "the uninterrupted job"
job="$(submit uninterrupted)"
finish "$job" uninterrupted

echo "the job that is hurt"
export LAUNCH="--shortest=5"
job="$(submit hurt --config.checkpoint.every=5)"
wait_for "step 8" has_step hurt 8
echo "kill -KILL task 1"
kill -KILL "$(pid_of hurt 1)"
wait_for "the supervisor to start again" has_restarted hurt 1
wait_for "step 14" has_step hurt 14
echo "kill -STOP task 0"
kill -STOP "$(pid_of hurt 0)"
wait_for "the supervisor to start again" has_restarted hurt 2
wait_for "step 24" has_step hurt 24
echo "the first node fails"
fail_node n1
wait_for "the job to be requeued" is_pending
slurmd -N n1
finish "$job" hurt
wait_for "the nodes" nodes_are idle

echo "the job on fewer nodes"
export LAUNCH="--restarts=30"
job="$(submit fewer --config.checkpoint.every=5)"
wait_for "step 12" has_step fewer 12
echo "the second node fails"
fail_node n2
finish "$job" fewer
slurmd -N n2
wait_for "the nodes" nodes_are idle
unset LAUNCH

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

.venv/bin/python tests/cluster/check.py "$folder" "$STEPS" || fail "a job did not heal or resume exactly"
echo "passed in $SECONDS s: jobs of 2 tasks on $(slurmctld -V) that were hurt and requeued equal the uninterrupted one"
