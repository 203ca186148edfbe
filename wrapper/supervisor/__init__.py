"""The supervisor: one process a job, the shell of sockets, clock, signals and files around `resihp.controller`.

`resihp run` becomes the `guardian` while the job runs, which restarts `process` if that dies. `shell` takes events in
and carries actions out; `agents` keeps the connections; `journaling` writes the journal, replicates it, and holds
actions back until a quorum knows the decisions behind them; `checkpoint_commit`, `operators`, `rendezvous` and
`node_history` do one task each; `collaborators` describes the parts that the shell is given. Decisions about the job
are the controller's, and each is in the journal before it is acted on.
"""
