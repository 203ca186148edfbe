"""The supervisor's requests to Slurm for a job, in the background: drains, replacements, comments, requeueing.

`desk` is the only entry: actions of the controller go onto its `agenda` and are carried out by `own_job`, `nodes`,
`replacements`; `comment_writer` writes the text of `job_comment`. `exclusion_lists` are the user's, for all
submissions. `requeue` and `chain` are for the job's end. Everything goes through `slurm.client`; answers go to the
controller as events. Decides nothing that the controller did not ask for.
"""
