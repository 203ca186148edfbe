"""Durability of decisions: `writer` puts them on the leader's disk, `replication` into the agents' copies.

`gate` holds back the actions behind a decision until both have it. Decides nothing about the job.
"""
