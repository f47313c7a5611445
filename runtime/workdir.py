"""What a run's folder holds, by name, as far as it is copied to a bucket or read by more than one part of a run."""

from runtime.storage.mirror import Holds

CHECKPOINTS = "checkpoints"  # and what begins like it: sent by checkpointing/shipping.py
BEATS = "heartbeats"  # the signs of life of processes (reporting/heartbeat.py)
MEMORY = "memory.json"  # names the run whose saves are in memory (checkpointing/memory/tier.py)
HOLDS = Holds(
  own=("lock", "home", "attempts", "supervisor.json"),
  sent=CHECKPOINTS,
  passing=(BEATS, MEMORY),
  beat=f"{BEATS}/0.json",
)


def of_process(rank: int) -> tuple[str, ...]:
  """Patterns of the files that a process writes, and not process 0 for all."""
  return f"{BEATS}/{rank}.json", f"profile/*/process-{rank}.*"
