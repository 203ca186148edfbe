"""Finds why a process, a device or a node ended: one verdict from exits, logs and the kernel's messages. Pure.

`clues` finds the relevant lines, with the table in `signatures` and NVIDIA's `xids`; `candidates` turns them into
possible causes (`reports`), and `diagnosis` weighs these. Never decides on the reaction. Called by the controller
(`fail_stop.root_causes`) and by agents, which read the clues where the logs are.
"""
