"""What the supervisor has Slurm do for a job, in the background: drains, replacements, comments, requeueing.

Everything goes through `slurm.client`; answers come back to the controller as events. Decides nothing that the
controller did not ask for.
"""
