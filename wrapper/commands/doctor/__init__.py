"""`resihp doctor`: check whether this machine, cluster and allocation can run resihp. Changes nothing.

`command` runs the checks: of the `machine`, its `places`, Slurm (`slurm_checks` queries it, `slurm_settings` and `site`
interpret the answers), and all `nodes` of an allocation.
"""
