"""Slow-downs in what others have recorded: logs, series of iteration times, per-operation traces. Pure.

=========================================  =====================================================================
`analysis`                                 what `resihp analyze` answers, and its JSON
`recordings`, `series`                     iteration times alone: how they are read, and where they change
`traces`, `dependencies`                   per-operation traces: which rows are sound, what waits for what
`operations`, `peer_slowness`, `slow_runs`  which ranks of a trace are slow, and when
`what_if`                                  what the steps would have taken without stragglers
=========================================  =====================================================================
"""
