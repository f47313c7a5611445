#!/usr/bin/env bash
# A training job under SLURM that resumes after failures, preemption and time limits. Submit it from the repository's
# folder:
#
#     sbatch docs/launch/slurm.sh --config=configs/fsdp.py [--workdir=DIR] [--config.FIELD=VALUE ...]
#
# The flags are train.py's. The workdir must be on a file system that all nodes share. The default is runs/slurm-JOBID,
# which stays the same after a requeue. Change the resources below, or with flags of sbatch. See docs/cluster.md.
#
# A supervisor on the first node (python -m tools.launch --slurm --restart) starts each process as a step of its own. It
# starts the job again if a process dies or hangs. Variables for it: LAUNCH holds its flags, as in
# LAUNCH=--lost-for=600, and PYTHON is the interpreter.
#
# Each task gets an equal part of the GPUs of its node: request GPUs per node, and bind none to tasks (no
# --gpus-per-task). With --ntasks-per-node=1, one task drives all GPUs of its node.

#SBATCH --job-name=meshwright
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00

# If a node fails, the job goes on with the others (--no-kill).
# SIGTERM two minutes before the time limit: enough for a step, a checkpoint and the exit. As written, the signal goes
# to the tasks alone. With B:TERM@120 it would go to this script alone.
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append

set -euo pipefail

PYTHON="${PYTHON:-.venv/bin/python}"
workdir="runs/slurm-$SLURM_JOB_ID"
for flag; do
  case "$flag" in
    --workdir=*) workdir="${flag#*=}" ;;
    --workdir) echo "error: --workdir has no value here; write --workdir=DIR" >&2 && exit 2 ;;
  esac
done

if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
  export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" # srun no longer inherits it from sbatch
fi

# If the first node fails, the job would hold the others and do nothing. So the last node watches the first, and requeues
# the job if SLURM has given that up.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if [ "${#nodes[@]}" -gt 1 ]; then
  # shellcheck disable=SC2016 # the inner shell expands them
  srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="${nodes[-1]}" --input=none bash -c '
    trap : TERM
    while sleep 30 || true; do
      left="$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N)"
      if [ -n "$left" ] && ! scontrol show hostnames "$left" | grep -qx "$1"; then
        scontrol requeue "$SLURM_JOB_ID"
      fi
    done' watch "${nodes[0]}" 2>/dev/null &
  watch=$!
  trap 'kill "$watch" 2>/dev/null || true' EXIT
fi

# When SLURM ends the job (requeue, scancel), it sends SIGTERM to the tasks and to this shell, and SIGKILL after
# KillWait seconds. The shell must outlive the tasks: if it exits first, SLURM kills srun and the log is cut off.
trap : TERM

status=0
# Twelve starts in a row take longer than SLURM needs to notice that a node is gone: 5 minutes, if nobody has changed it.
# shellcheck disable=SC2086 # LAUNCH may hold several flags
"$PYTHON" -u -m tools.launch --slurm --restart ${LAUNCH:---restarts=12} -- "$@" --workdir="$workdir" || status=$?
if [ "$status" != 0 ] || "$PYTHON" -m checkpointing.finished "$workdir"; then
  exit "$status"
fi

# Stopped early. If SLURM ended the job, it has already decided whether to requeue it. If only the tasks got the signal,
# SLURM still reports the job as RUNNING, and the requeue is up to this script.
if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
  echo "stopped early: job $SLURM_JOB_ID is requeued and will resume from the newest checkpoint in $workdir"
  scontrol requeue "$SLURM_JOB_ID"
fi
