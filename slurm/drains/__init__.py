"""Steps taken for a node with a verdict: a drain through Slurm (`drain`), a request to the site's hook, or avoidance.

`spool` writes requests to the hook, and `exclusions` lists the nodes that a user's own jobs avoid. Other packages
decide for which nodes these steps are taken.
"""
