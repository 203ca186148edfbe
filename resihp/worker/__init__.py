"""A worker's process from the outside: how it is forked, how it becomes the user's program, and its checkpoint files.

`forkserver` imports the libraries once and forks a worker for each request; `entry` runs the user's program in it;
`checkpoints` manages checkpoint folders as files. Torch is imported only in processes that train. Started by agents.
"""
