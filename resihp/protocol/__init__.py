"""Socket communication: message types (`messages`), their encoding (`framing`), and conversations that survive their
connections.

`client` is a worker's end of the socket to its agent; `resumable` is the state that agent and supervisor keep so that a
message arrives once and in order whatever breaks in between. Decides nothing about training; nothing is ever unpickled.
Used by workers, agents and the supervisor.
"""
