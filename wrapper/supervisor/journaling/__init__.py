"""How what is decided becomes durable: `writer` puts it on the leader's disk, `replication` into the agents' copies.

`gate` holds back what follows until both have it. Decides nothing of the job.
"""
