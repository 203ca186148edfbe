"""One module or folder for each command of `resihp`: options in, an answer out. `resihp.wrapper.cli` registers the
commands.

A command validates its input before it starts anything, and prints through `resihp.wrapper.output`: data on stdout,
messages on stderr. A command with many options takes them as a dataclass (`options`). Slow imports are inside
functions, so that `resihp --help` is quick.
"""
