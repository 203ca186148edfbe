"""The supervisor: one process for each job, which connects `resihp.controller` to sockets, clock, signals and files.

While the job runs, the process of `resihp run` is the `guardian`, which starts `process` and restarts it if it dies.
`shell` hands events to the controller and carries out the controller's actions. `agents` keeps the connections to the
agents. `journaling` writes the journal, replicates it, and delays actions until a quorum knows the decisions that they
follow from. `checkpoints` commits the checkpoints of `resihp.Trainer` and finds those of other scripts. `operators`,
`node_history`, `attention` and `patient_output` do one task each; `collaborators` describes the parts that are passed
to the shell. The controller makes all decisions about the job, and each decision is in the journal before it is acted
on.
"""
