"""`resihp doctor`: check whether this machine, cluster and allocation can run resihp. Changes nothing.

`command` runs all checks. `machine`, `places` and `training_libraries` check this machine; `slurm_checks` queries
Slurm, and `slurm_settings` and `site` interpret the answers; `nodes` checks all nodes of an allocation.
"""
