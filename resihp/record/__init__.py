"""The durable record of a job: its journal, the meaning of the entries, and the rule who may append to it.

`journal` has the entries and the file, `quorum` derives from them who may lead and which entries count as decided,
`describe` puts an entry into words. No clock, no socket. Written by the supervisor's process; read by take-overs,
agents, the ledger and every command that reports on a job.
"""
