"""Restart in place, for scripts that do not declare a model: all their processes are ended, and started again on the
healthy nodes of the job, in a new round.

`restarts` decides whether a script is started again, and carries it out; `next_round` chooses the nodes. A script that
trains with resihp.Trainer goes on without a restart (`transition`), if need be from its newest checkpoint (`rollback`).
"""
