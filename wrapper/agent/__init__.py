"""The agent: one process a node, which starts workers, passes messages on, and reports exits at once.

It follows the present leader (`supervisor_link`) and holds a copy of the journal (`journal_copy`); if no supervisor
leads any more, it helps to elect and start a successor (`election`, `peers`, `successor`). Decides nothing about
training. Started by `wrapper.launch`; other packages use only `process`.
"""
