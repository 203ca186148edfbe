"""The supervisor: one process a job, the shell of sockets, clock, signals and files around `resihp.controller`.

`guardian` is what `resihp run` is while the job runs: it starts `process` again when that dies. `shell` takes events in
and carries actions out, `agents` is who is connected, `replication` the journal's copies. What is decided, the
controller decides; what is durable is in the journal before it is acted on.
"""
