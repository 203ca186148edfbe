"""Finds the root cause of an incident: one verdict from exit statuses, logs and messages of the kernel. Pure.

`clues` finds the relevant lines of logs, with the tables in `signatures` and `xids`; `candidates` turns the lines into
possible causes (`reports`), and `diagnosis` chooses the root cause. Never decides on the reaction. Called by the
controller (`fail_stop.root_causes`), and by agents, which read the clues on the nodes of the logs.
"""
