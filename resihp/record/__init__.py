"""The durable record of a job: its journal, the meaning of the journal's entries, and the rule for leadership.

`journal` defines the entries and `journal_file` the file; `fold` applies entries to the record that `state` defines;
`quorum` derives the voters, the leader and the decisions that count; `describe` puts an entry into words. Uses no clock
and no socket. Written by the supervisor process; read by new supervisors, by agents, by the ledger, and by every
command that reports on a job.
"""
