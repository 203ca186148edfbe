"""Steps taken for a node with a verdict: a drain by us (`drain`), a request to the site's hook, or avoidance.

`spool` holds requests to the hook, `exclusions` the nodes that a user's own jobs avoid. Other packages decide which
nodes deserve it.
"""
