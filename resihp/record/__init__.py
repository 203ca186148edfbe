"""What is remembered of a job: its journal, what the entries mean, and who may write on.

`journal` has the entries and the file, `quorum` reads off them who may lead and what counts as decided, `describe` says
an entry in words. No clock, no socket. Written by the supervisor's process; read by take-overs, agents, the ledger and
every command that tells of a job.
"""
