"""What is done about a node with a verdict, rung by rung: drained by us (`drain`), by the site's hook, or avoided.

`spool` are requests to the hook, `exclusions` nodes that a user's own jobs avoid. Which node deserves it is decided by
others.
"""
