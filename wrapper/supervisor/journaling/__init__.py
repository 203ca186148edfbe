"""Durability of decisions: `writer` writes them to the leader's disk, `replication` to the agents' copies of the
journal.

`gate` delays the actions that follow from a decision until the decision is durable in both places. Decides nothing
about the job.
"""
