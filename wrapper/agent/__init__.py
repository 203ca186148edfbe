"""The agent: one process on each node, which starts workers, forwards messages, and reports exits at once.

It follows the current leader (`supervisor_link`) and keeps a copy of the journal (`journal_copy`). If no supervisor
leads any more, it takes part in the election and the start of a successor (`election`, `peers`, `successor`). Decides
nothing about training. Started by `resihp.wrapper.launch`; other packages use only `process`.
"""
