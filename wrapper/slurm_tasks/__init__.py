"""What the supervisor has Slurm do for a job, in the background: drains, replacements, comments, requeueing.

`desk` is the one door: what the controller asks for goes onto its `agenda` and is done by `own_job`, `nodes`,
`replacements`; `comment_writer` writes what `job_comment` says. `exclusion_lists` are the user's, whoever submits.
`requeue` and `chain` are for the job's end. Everything goes through `slurm.client`; answers come back to the controller
as events. Decides nothing that it did not ask for.
"""
