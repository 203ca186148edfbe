"""The supervisor: one process a job, the shell of sockets, clock, signals and files around `resihp.controller`.

`guardian` is what `resihp run` is while the job runs: it starts `process` again when that dies. `shell` takes events in
and carries actions out; `agents` is who is connected, `replication` the journal's copies, `decision_gate` holds actions
back until a quorum knows what was decided; `checkpoint_commit`, `operators`, `rendezvous` and `node_history` are one
task each; `collaborators` what the shell is given. What is decided, the controller decides; what is durable is in the
journal before it is acted on.
"""
