"""Finds slow-downs in files of jobs that ran without resihp: logs, tables of iteration times, traces. Pure.

=========================================  =====================================================================
`analysis`                                 the result of `resihp analyze`, and its JSON
`recordings`, `series`                     iteration times: reading them, and finding their changes
`hindsight`, `background`                  judgement of the changes by the whole file
`traces`, `dependencies`                   per-operation traces: valid rows, and dependencies between operations
`operations`, `peer_slowness`, `slow_runs`  slow ranks of a trace, and the steps in which they are slow
`what_if`                                  time of the steps without stragglers
=========================================  =====================================================================
"""
