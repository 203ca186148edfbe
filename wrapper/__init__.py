"""The job wrapper around `resihp`: command line, supervisor and agents of a job, and the listeners that they report to.

=================  ============================================================================================
`cli`              the command line; `exit_codes`: the exit code of each error; `job_folder`: a job's files;
                   `strict_modes`: checks who could have written a file before it is trusted
`commands`         what each command does
`config`           the configuration, and the request that describes one run
`launch`           the allocation, its nodes, and the start of agents on them
`supervisor`       one process a job: the shell around the controller, and the guardian that watches it
`agent`            one process a node: workers, and a copy of the journal
`slurm_tasks`      the supervisor's requests to Slurm
`sinks`            listeners of a job: terminal, metrics, hooks, TensorBoard
`output`           the printed results of commands
=================  ============================================================================================
"""
