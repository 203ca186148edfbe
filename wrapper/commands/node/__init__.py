"""`resihp node`: drain, exclude and repair nodes by hand, and show their health.

`command` has the drain ladder, `check` validates a node (`gpu_speed` measures its GPUs), `holding` finds the job that
holds a node, `maintenance` records repairs.
"""
