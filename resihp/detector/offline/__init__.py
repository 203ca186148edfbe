"""Finds slow-downs in recordings of others: logs, series of iteration times, per-operation traces. Pure.

=========================================  =====================================================================
`analysis`                                 the result of `resihp analyze`, and its JSON
`recordings`, `series`                     iteration times alone: how they are read, and where they change
`hindsight`, `background`                  which changes stand once the file is read to its end
`traces`, `dependencies`                   per-operation traces: which rows are sound, and what waits for what
`operations`, `peer_slowness`, `slow_runs`  which ranks of a trace are slow, and when
`what_if`                                  how long the steps would have taken without stragglers
=========================================  =====================================================================
"""
