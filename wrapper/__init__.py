"""The job wrapper around `resihp`: its command line, the supervisor and the agents of a job, and the listeners to which
they report.

=================  ============================================================================================
`cli`              the command line; `exit_codes`: the exit code of each error; `job_folder`: a job's files;
                   `strict_modes`: checks before a file is trusted that nobody else could have written it
`commands`         one module or folder for each command
`config`           the configuration, and the request that describes one run
`launch`           the allocation, its nodes, and the start of agents on them
`supervisor`       one process for each job: the shell around the controller, and the guardian that restarts it
`agent`            one process for each node: workers, and a copy of the journal
`slurm_tasks`      the supervisor's requests to Slurm
`sinks`            listeners of a job: terminal, metrics, hooks, TensorBoard, traces
`output`           the printed results of commands
=================  ============================================================================================
"""
