"""A worker's process from the outside: forking it, turning it into the user's program, and its checkpoint files.

`forkserver` imports the libraries once and forks a worker on each request. `entry` runs the user's program in the
worker. `checkpoints` manages checkpoint folders as files. Torch is imported only in processes that train. The fork
server is started by agents.
"""
