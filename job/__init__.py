"""What keeps a run alive from outside: it starts the processes of a job, watches them, and starts them again.

attempt.py is one start of all processes on this machine, slurm.py the same on the nodes of a SLURM job, and
supervisor.py starts again what fails or hangs. tools.launch is the command.
"""
