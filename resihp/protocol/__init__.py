"""Socket communication: message types (`messages`), their encoding (`framing`), and conversations that survive their
connections.

`client` is a worker's end of the socket to its agent. `resumable` is the state with which agent and supervisor deliver
each message once and in order, even if connections break. The package decides nothing about training and never
unpickles anything. Used by workers, agents and the supervisor.
"""
