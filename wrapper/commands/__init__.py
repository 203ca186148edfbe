"""One module or folder for each command of `resihp`: options in, an answer out; `wrapper.cli` registers them.

A command refuses what it can refuse before anything is started, and prints through `wrapper.output`: data on stdout,
messages on stderr. One of many options takes them as a dataclass (`options`). Heavy imports stand inside functions, so
that `resihp --help` is quick.
"""
