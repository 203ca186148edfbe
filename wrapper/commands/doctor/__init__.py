"""`resihp doctor`: can this machine, this cluster, this allocation run it? Looks, changes nothing.

`command` puts the checks together: of the `machine`, its `places`, Slurm (`slurm_settings`, `site`), and all `nodes` of
an allocation.
"""
