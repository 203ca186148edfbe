"""`resihp doctor`: can this machine, this cluster, this allocation run it? Looks, changes nothing.

`command` puts the checks together: of the `machine`, its `places`, Slurm (`slurm_checks` asks, `slurm_settings` and
`site` say what it means), and all `nodes` of an allocation.
"""
