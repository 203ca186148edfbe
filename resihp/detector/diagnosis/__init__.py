"""Why a process, a device or a node ended: from exits, logs and the kernel's messages to one verdict. Pure.

`clues` finds the lines that say anything, by the table in `signatures` and NVIDIA's `xids`; `candidates` makes possible
causes of them, and `diagnosis` weighs these. Never decides what is done about it. Called by the controller
(`fail_stop.root_causes`) and by agents, which read the clues where the logs are.
"""
