"""A worker's process from the outside: how it is forked, how it becomes the user's program, files beside it.

`forkserver` imports once and forks a worker for each request, `entry` runs the user's program in it, `checkpoints` the
folders of checkpoints as files. Imports torch only where a process is for nothing else. Started by agents.
"""
