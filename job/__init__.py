"""What keeps a run alive, from inside and from outside.

keeper.py is the door for the training loop: when the state is compared and saved, what is asked of the run, and when it
ends. attempt.py is one start of all processes of a job on this machine, slurm.py the same on the nodes of a SLURM job,
and supervisor.py starts again what fails or hangs. tools.launch is the command.
"""
