"""The job wrapper around `resihp`: the command line, a job's supervisor and its agents, and everybody they tell.

=================  ============================================================================================
`cli`              the command line; `exit_codes`: which error ends a command how; `job_folder`: a job's files;
                   `strict_modes`: whose files are believed
`commands`         what each command does
`config`           what a run was asked to be
`launch`           the allocation, its nodes, and who starts agents there
`supervisor`       one process a job: the shell around the controller, and the guardian that watches it
`agent`            one process a node: workers, and a copy of the journal
`slurm_tasks`      what the supervisor has Slurm do
`sinks`            who hears of a job: terminal, metrics, hooks, TensorBoard
`output`           what commands print
=================  ============================================================================================
"""
