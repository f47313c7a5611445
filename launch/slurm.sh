#!/usr/bin/env bash
# A training job under SLURM that goes on after preemption and time limits. Submit it from the repository's folder:
#
#     sbatch launch/slurm.sh --config=configs/fsdp.py [--workdir=DIR] [--config.FIELD=VALUE ...]
#
# The flags are train.py's. The workdir lies on a file system that all nodes share; without the flag it is
# runs/slurm-JOBID, the same after a requeue. Change the resources here, or by flags of sbatch. See docs/cluster.md.
#
# One task a GPU: under SLURM each process takes the GPU of the node with the number SLURM_LOCALID, so ask for GPUs by
# node and bind none to tasks (no --gpus-per-task). Or one task a node, --ntasks-per-node=1, which then drives them all.

#SBATCH --job-name=meshwright
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00

# Two minutes before the time is up the tasks get SIGTERM: enough for a step, a checkpoint and the way out. With B: the
# signal would go to this script alone; without it, it goes to the tasks alone.
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
  export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" # srun does not take it from sbatch any more
fi

# Whether there is a checkpoint of the last step.
finished() {
  "$PYTHON" - "$workdir" <<'END'
import json, pathlib, sys

workdir = pathlib.Path(sys.argv[1])
config = json.loads((workdir / "config.json").read_text())
last = min(config["steps"], config["stop_after"] or config["steps"])
sys.exit(0 if (workdir / "checkpoints" / str(last)).is_dir() else 1)
END
}

# When SLURM ends the job (requeue, scancel) it sends SIGTERM to this shell as well as to the tasks, and SIGKILL after
# KillWait seconds. The shell stays until the tasks have saved: when it ends, SLURM kills srun, and the log breaks off.
trap : TERM

status=0
srun --label --kill-on-bad-exit=1 "$PYTHON" -u train.py "$@" --workdir="$workdir" || status=$?
if [ "$status" != 0 ] || finished; then
  exit "$status"
fi

# Stopped early. Where SLURM has ended the job itself it has decided what becomes of it; where only the tasks were told
# to stop it still calls the job running.
if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
  echo "stopped early: job $SLURM_JOB_ID is requeued and will go on from the newest checkpoint in $workdir"
  exec scontrol requeue "$SLURM_JOB_ID"
fi
