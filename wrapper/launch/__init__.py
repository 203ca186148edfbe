"""Where a job runs and how its agents get there: the allocation, this node's addresses and ports, the launchers.

`allocation` reads what Slurm's environment says, `slurm_launcher` starts agents by one `srun` step, `launcher` starts
them as processes of this machine. Knows nothing of training. Called by the supervisor and by commands that look.
"""
