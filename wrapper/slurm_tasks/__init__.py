"""The supervisor's requests to Slurm for a job, in the background: drains, replacements, comments, requeueing.

`desk` is the only entry point: it puts the controller's actions onto its `agenda`, and `own_job`, `nodes` and
`replacements` carry them out. `comment_writer` writes the text of `job_comment`. `exclusion_lists` are the user's lists
of excluded nodes, for all submissions. `requeue` and `chain` are used at the job's end. All calls go through
`resihp.slurm.client`; answers go to the controller as events. Decides nothing that the controller did not request.
"""
