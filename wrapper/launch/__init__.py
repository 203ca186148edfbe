"""Where a job runs, and how its agents start: the Slurm allocation, this node's addresses and ports, and the launchers.

`allocation` reads Slurm's environment. `slurm_launcher` starts agents by one `srun` step; `launcher` starts them as
processes of this machine. Knows nothing about training. Called by the supervisor, and by commands that inspect a job.
"""
