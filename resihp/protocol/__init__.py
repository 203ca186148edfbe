"""Everything that crosses a socket of ours: `messages`, their bytes (`framing`), and conversations that last.

`client` is a worker's end of the socket to its agent, `resumable` what agent and supervisor keep so that a message
arrives once and in order whatever breaks in between. Decides nothing about training; nothing is ever unpickled.
Used by workers, agents and the supervisor.
"""
