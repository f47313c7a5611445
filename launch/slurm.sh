#!/usr/bin/env bash
# A training job under SLURM that resumes after preemption and time limits. Submit it from the repository's folder:
#
#     sbatch launch/slurm.sh --config=configs/fsdp.py [--workdir=DIR] [--config.FIELD=VALUE ...]
#
# The flags are train.py's. The workdir must be on a file system that all nodes share. The default is runs/slurm-JOBID,
# which stays the same after a requeue. Change the resources below, or with flags of sbatch. See docs/cluster.md.
#
# Runs one task per GPU. Under SLURM each process takes the GPU of its node with number SLURM_LOCALID. So request GPUs
# per node and bind none to tasks (no --gpus-per-task). With --ntasks-per-node=1, one task drives all GPUs of its node.

#SBATCH --job-name=meshwright
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00

# SIGTERM two minutes before the time limit: enough for a step, a checkpoint and the exit. As written, the signal goes
# to the tasks alone. With B:TERM@120 it would go to this script alone.
#SBATCH --signal=TERM@120
#SBATCH --requeue
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

if [ "${SLURM_NTASKS_PER_NODE:-}" = 1 ] && [ "${SLURM_GPUS_ON_NODE:-0}" -gt 1 ]; then
  JAX_LOCAL_DEVICE_IDS="$(seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))"
  export JAX_LOCAL_DEVICE_IDS
fi
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
  export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" # srun no longer inherits it from sbatch
fi

# Succeeds if the last step is done: its checkpoint exists, and its evaluation has been made.
finished() {
  "$PYTHON" - "$workdir" <<'END'
import json, pathlib, sys

workdir = pathlib.Path(sys.argv[1])
config = json.loads((workdir / "config.json").read_text())
last = min(config["steps"], config["stop_after"] or config["steps"])
record = workdir / "checkpoints" / str(last) / "run" / "metadata"
sys.exit(0 if record.exists() and json.loads(record.read_text())["loop"]["evaluated"] else 1)
END
}

# When SLURM ends the job (requeue, scancel), it sends SIGTERM to the tasks and to this shell, and SIGKILL after
# KillWait seconds. The shell must outlive the tasks: if it exits first, SLURM kills srun and the log is cut off.
trap : TERM

status=0
srun --label --kill-on-bad-exit=1 "$PYTHON" -u train.py "$@" --workdir="$workdir" || status=$?
if [ "$status" != 0 ] || finished; then
  exit "$status"
fi

# Stopped early. If SLURM ended the job, it has already decided whether to requeue it. If only the tasks got the signal,
# SLURM still reports the job as RUNNING, and the requeue is up to this script.
if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
  echo "stopped early: job $SLURM_JOB_ID is requeued and will resume from the newest checkpoint in $workdir"
  exec scontrol requeue "$SLURM_JOB_ID"
fi
